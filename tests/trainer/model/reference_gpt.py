"""An independent serial model for comparison: plain PyTorch autograd, unfused, written from the equations.

The model reads weights under the trainer's global names and shares no code with the trainer. Activations are [B, S, H].
"""

import torch


def reference_loss(weights, model, tokens, labels, loss_mask=None, auxiliary=None):
    """Sum of the token losses over valid tokens, in the dtype of ``weights``.

    Differentiable by autograd.

    ``auxiliary``: a list that receives the auxiliary losses of each layer with experts.
    """
    logits = reference_logits(weights, model, tokens, auxiliary)
    losses = torch.logsumexp(logits, -1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (losses if loss_mask is None else losses * loss_mask).sum()


def reference_logits(weights, model, tokens, auxiliary=None):
    """[B, S, V] over the unpadded vocabulary of ``weights``."""
    length = tokens.shape[1]
    hidden = weights["embedding.word.weight"][tokens]
    if "embedding.position.weight" in weights:
        hidden = hidden + weights["embedding.position.weight"][:length]
    for layer in range(model.num_layers):
        part = _Part(weights, f"layers.{layer}.")
        hidden = hidden + _attention(
            _Part(weights, f"layers.{layer}.attention."), model, _norm(part, "attention_norm", model, hidden)
        )
        normed = _norm(part, "mlp_norm", model, hidden)
        if f"layers.{layer}.moe.router.weight" in weights:
            hidden = hidden + _moe(weights, f"layers.{layer}.moe.", model, normed, auxiliary)
        else:
            hidden = hidden + _mlp(_Part(weights, f"layers.{layer}.mlp."), model, normed)
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
    """Rotate each pair (i, i + rotated/2) as a complex number by position * base^(-2i/rotated)."""
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


def _moe(weights, prefix, model, hidden, auxiliary):
    """A layer with experts, computed token by token and expert by expert.

    Tokens come in the order of positions, which decides the drops.
    """
    tokens = hidden.transpose(0, 1).reshape(-1, hidden.shape[-1])
    logits = tokens @ weights[f"{prefix}router.weight"].T
    chosen = [
        sorted(range(model.num_experts), key=lambda expert: (-float(row[expert]), expert))[: model.moe_router_topk]
        for row in logits.detach()
    ]
    choices = [
        (token, expert, _router_weight(row, experts, place, model))
        for token, (row, experts) in enumerate(zip(logits, chosen, strict=True))
        for place, expert in enumerate(experts)
    ]
    if auxiliary is not None:
        auxiliary.append(_auxiliary_loss(logits, choices, model))
    outputs = [torch.zeros_like(token) for token in tokens]
    for token, expert, weight in _kept(choices, model):
        own = {
            name: weights[f"{prefix}experts.{name}"][expert]
            for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
            if f"{prefix}experts.{name}" in weights
        }
        outputs[token] = outputs[token] + weight * _mlp(_Part(own, ""), model, tokens[token])
    mixed = torch.stack(outputs).view(hidden.shape[1], hidden.shape[0], -1).transpose(0, 1)
    if model.moe_shared_expert_intermediate_size is None:
        return mixed
    return mixed + _mlp(_Part(weights, f"{prefix}shared_expert."), model, hidden)


def _router_weight(row, experts, place, model):
    if model.moe_router_score_function == "sigmoid":
        scores = 1 / (1 + torch.exp(-row))
        weight = scores[experts[place]]
        weight = weight / scores[experts].sum() if len(experts) > 1 else weight
    elif model.moe_router_pre_softmax:
        weight = torch.exp(row[experts[place]]) / torch.exp(row).sum()
    else:
        weight = torch.exp(row[experts[place]]) / torch.exp(row[experts]).sum()
    return weight * (model.moe_router_topk_scaling_factor or 1.0)


def _kept(choices, model):
    if model.moe_expert_capacity_factor is None:
        return choices
    capacity = -int(-len(choices) / model.num_experts * model.moe_expert_capacity_factor // 1)
    kept = []
    for expert in range(model.num_experts):
        own = [choice for choice in choices if choice[1] == expert]
        if model.moe_token_drop_policy == "probs":
            own.sort(key=lambda choice: -float(choice[2].detach()))
        kept += own[:capacity]
    return kept


def _auxiliary_loss(logits, choices, model):
    """coefficient * E * sum_i f_i P_i, and coefficient * mean(log(sum(exp(logits)))^2)."""
    scores = 1 / (1 + torch.exp(-logits)) if model.moe_router_score_function == "sigmoid" else torch.exp(logits)
    shares = (scores / scores.sum(1, keepdim=True)).mean(0)
    total = (model.moe_z_loss_coeff or 0.0) * (torch.exp(logits).sum(1).log() ** 2).mean()
    for expert in range(model.num_experts):
        frequency = sum(choice[1] == expert for choice in choices) / len(choices)
        total = total + model.moe_aux_loss_coeff * model.num_experts * frequency * shares[expert]
    return total
