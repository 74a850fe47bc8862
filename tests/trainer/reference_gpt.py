"""An independent serial model to compare with: plain PyTorch autograd, unfused, written from the equations.

It reads weights under the trainer's global names and shares no code with the trainer. Activations are [B, S, H].
"""

import torch


def reference_loss(weights, model, tokens, labels, loss_mask=None):
    """Sum of the token losses over valid tokens, by autograd in the dtype of ``weights``."""
    logits = reference_logits(weights, model, tokens)
    losses = torch.logsumexp(logits, -1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (losses if loss_mask is None else losses * loss_mask).sum()


def reference_logits(weights, model, tokens):
    """[B, S, V] of the unpadded vocabulary ``weights`` hold."""
    length = tokens.shape[1]
    hidden = weights["embedding.word.weight"][tokens]
    if "embedding.position.weight" in weights:
        hidden = hidden + weights["embedding.position.weight"][:length]
    for layer in range(model.num_layers):
        part = _Part(weights, f"layers.{layer}.")
        hidden = hidden + _attention(
            _Part(weights, f"layers.{layer}.attention."), model, _norm(part, "attention_norm", model, hidden)
        )
        hidden = hidden + _mlp(_Part(weights, f"layers.{layer}.mlp."), model, _norm(part, "mlp_norm", model, hidden))
    hidden = _norm(_Part(weights, ""), "final_norm", model, hidden)
    head = weights.get("head.weight", weights["embedding.word.weight"])
    return hidden @ head.T


class _Part:
    def __init__(self, weights, prefix):
        self._weights, self._prefix = weights, prefix

    def __call__(self, name):
        return self._weights.get(self._prefix + name)

    def linear(self, name, inputs):
        bias = self(f"{name}.bias")
        outputs = inputs @ self(f"{name}.weight").T
        return outputs if bias is None else outputs + bias


def _norm(part, name, model, hidden):
    weight, bias = part(f"{name}.weight"), part(f"{name}.bias")
    if model.normalization == "RMSNorm":
        return weight * hidden / ((hidden**2).mean(-1, keepdim=True) + model.norm_epsilon).sqrt()
    centred = hidden - hidden.mean(-1, keepdim=True)
    return weight * centred / ((centred**2).mean(-1, keepdim=True) + model.norm_epsilon).sqrt() + bias


def _attention(part, model, hidden):
    heads, groups, width = model.num_attention_heads, model.query_groups, model.head_dim
    per_group = heads // groups
    packed = part.linear("qkv", hidden)
    contexts = []
    length = hidden.shape[1]
    allowed = torch.tril(torch.ones(length, length, dtype=torch.bool))
    for head in range(heads):
        group, place = divmod(head, per_group)
        start = group * (per_group + 2) * width
        query, key, value = (
            packed[..., start + index * width : start + (index + 1) * width]
            for index in (place, per_group, per_group + 1)
        )
        if model.position_embedding_type == "rope":
            query, key = _rotate(query, model), _rotate(key, model)
        scores = query @ key.transpose(-1, -2) / width**0.5
        contexts.append(torch.softmax(torch.where(allowed, scores, -torch.inf), -1) @ value)
    return part.linear("projection", torch.cat(contexts, -1))


def _rotate(vectors, model):
    """Each pair (i, i + rotated/2) as a complex number, turned by position * base^(-2i/rotated)."""
    rotated = int(model.head_dim * model.rotary_percent)
    half = rotated // 2
    positions = torch.arange(vectors.shape[-2], dtype=vectors.dtype)
    angles = positions[:, None] * model.rotary_base ** (-2 * torch.arange(half, dtype=vectors.dtype) / rotated)
    pairs = torch.complex(vectors[..., :half], vectors[..., half:rotated])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, vectors[..., rotated:]), -1)


def _mlp(part, model, hidden):
    if model.swiglu:
        gate_up, bias = part("fc1.weight"), part("fc1.bias")
        gate, up = (hidden @ gate_up[index].T + (0 if bias is None else bias[index]) for index in range(2))
        inner = gate * torch.sigmoid(gate) * up
    else:
        inner = part.linear("fc1", hidden)
        if model.openai_gelu:
            share = torch.tanh((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3))
        else:
            share = torch.erf(inner / 2**0.5)
        inner = inner * 0.5 * (1 + share)
    return part.linear("fc2", inner)
