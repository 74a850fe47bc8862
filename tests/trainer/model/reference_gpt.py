"""An independent serial model for comparison: plain PyTorch autograd, unfused, written from the equations.

The model reads weights under the trainer's global names and shares no code with the trainer. Activations are [B, S, H].
"""

import math

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
    return _output(weights, model, _hidden(weights, model, tokens, auxiliary))


def reference_further_losses(weights, model, tokens, labels, loss_mask):
    """Multi-token prediction: sum of the token losses of each depth, and number of its labels.

    DeepSeek-V3 (arXiv:2412.19437), equations 21 to 24: depth k has only the first S - k positions.
    """
    hidden, found = _hidden(weights, model, tokens), []
    for depth in range(1, model.mtp_num_layers + 1):
        layer = model.num_layers + depth - 1
        part = _Part(weights, f"layers.{layer}.")
        embedded = weights["embedding.word.weight"][tokens[:, depth:]] * (model.embedding_scale or 1)
        halves = (_norm(part, "embedding_norm", model, embedded), _norm(part, "hidden_norm", model, hidden[:, :-1]))
        hidden = _layer(weights, layer, model, part.linear("merge", torch.cat(halves, -1)), None)
        hidden = _norm(part, "final_norm", model, hidden)
        logits = _output(weights, model, hidden)
        of_labels = logits.gather(-1, labels[:, depth:].unsqueeze(-1)).squeeze(-1)
        counts = loss_mask[:, depth:]
        found.append((((torch.logsumexp(logits, -1) - of_labels) * counts).sum(), counts.sum()))
    return found


def _hidden(weights, model, tokens, auxiliary=None):
    """[B, S, H] after the final norm."""
    length = tokens.shape[1]
    hidden = weights["embedding.word.weight"][tokens] * (model.embedding_scale or 1)
    if "embedding.project.weight" in weights:
        hidden = hidden @ weights["embedding.project.weight"].T
    if model.embedding_layer_norm:
        hidden = _layer_norm(_Part(weights, "embedding."), "word_norm", model, hidden)
    if "embedding.position.weight" in weights:
        first = model.position_embedding_offset
        hidden = hidden + weights["embedding.position.weight"][first : first + length]
    for layer in range(model.num_layers):
        hidden = _layer(weights, layer, model, hidden, auxiliary)
    if model.has_final_norm:
        hidden = _norm(_Part(weights, ""), "final_norm", model, hidden)
    return hidden


def _output(weights, model, hidden):
    """[B, S, V] from the hidden [B, S, H]."""
    if "head.project.weight" in weights:
        hidden = hidden @ weights["head.project.weight"].T
    logits = hidden @ weights.get("head.weight", weights["embedding.word.weight"]).T + weights.get("head.bias", 0)
    if model.mup_base_hidden_size is not None:
        logits = logits * (model.mup_base_hidden_size / model.hidden_size)
    cap = model.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _layer(weights, layer, model, hidden, auxiliary):
    part = _Part(weights, f"layers.{layer}.")

    def norm(name, inputs):
        return _norm(part, name, model, inputs)

    def attend(inputs):
        return _attention(_Part(weights, f"layers.{layer}.attention."), model, inputs)

    def feed_forward(inputs):
        if f"layers.{layer}.moe.router.weight" in weights:
            return _moe(weights, f"layers.{layer}.moe.", model, inputs, auxiliary)
        return _mlp(_Part(weights, f"layers.{layer}.mlp."), model, inputs)

    if model.parallel_residual:
        of_mlp = "attention_norm" if model.shared_parallel_norm else "mlp_norm"
        return hidden + attend(norm("attention_norm", hidden)) + feed_forward(norm(of_mlp, hidden))
    for name, sublayer in (("attention", attend), ("mlp", feed_forward)):
        if model.norm_placement == "pre":
            hidden = hidden + sublayer(norm(f"{name}_norm", hidden))
        elif model.norm_placement == "post":
            hidden = norm(f"{name}_norm", hidden + sublayer(hidden))
        elif model.norm_placement == "output":
            hidden = hidden + norm(f"{name}_output_norm", sublayer(hidden))
        else:
            hidden = hidden + norm(f"{name}_output_norm", sublayer(norm(f"{name}_norm", hidden)))
    return hidden


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
    if model.normalization == "LayerNorm":
        return _layer_norm(part, name, model, hidden)
    weight = part(f"{name}.weight")
    weight = weight + 1 if model.apply_layernorm_1p else weight
    return weight * hidden / ((hidden**2).mean(-1, keepdim=True) + model.norm_epsilon).sqrt()


def _layer_norm(part, name, model, hidden):
    weight, bias = part(f"{name}.weight"), part(f"{name}.bias")
    weight = weight + 1 if model.apply_layernorm_1p else weight
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
        scores = query @ key.transpose(-1, -2) / (width**0.5 if model.mup_base_hidden_size is None else width)
        if model.position_embedding_type == "alibi":
            places = torch.arange(length, dtype=scores.dtype)
            scores = scores + alibi_slope(head, heads) * (places[None, :] - places[:, None])
        contexts.append(torch.softmax(torch.where(allowed, scores, -torch.inf), -1) @ value)
    return part.linear("projection", torch.cat(contexts, -1))


def alibi_slope(head, heads):
    """Press et al. 2021 (arXiv:2108.12409), section 3, and the authors' rule for other numbers of heads."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    if head < power:
        return 2 ** (-8 * (head + 1) / power)
    return 2 ** (-8 * (2 * (head - power) + 1) / (2 * power))


def _rotate(vectors, model):
    """Rotate each pair (i, i + rotated/2) as a complex number by position * base^(-2i/rotated)."""
    rotated = int(model.head_dim * model.rotary_percent)
    half = rotated // 2
    # Complex numbers have parts of 32 or 64 bits.
    wide = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    positions = torch.arange(vectors.shape[-2], dtype=wide.dtype)
    angles = positions[:, None] * model.rotary_base ** (-2 * torch.arange(half, dtype=wide.dtype) / rotated)
    pairs = torch.complex(wide[..., :half], wide[..., half:rotated])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, wide[..., rotated:]), -1).to(vectors.dtype)


def _mlp(part, model, hidden):
    if not model.is_gated:
        return part.linear("fc2", _activated(part.linear("fc1", hidden), model))
    weights, bias = part("fc1.weight"), part("fc1.bias")
    gate, up = (hidden @ weights[index].T + (0 if bias is None else bias[index]) for index in range(2))
    clamp, alpha = model.activation_clamp, model.activation_alpha
    if clamp is not None:
        gate, up = torch.where(gate > clamp, clamp, gate), torch.where(up.abs() > clamp, clamp * up.sign(), up)
    if alpha is not None:
        return part.linear("fc2", gate * torch.sigmoid(alpha * gate) * (up + 1))
    return part.linear("fc2", _activated(gate, model) * up)


def _activated(inner, model):
    if model.activation == "silu":
        return inner * torch.sigmoid(inner)
    if "relu" in model.activation:
        return torch.where(inner > 0, inner, 0.0) ** (2 if model.activation == "squared_relu" else 1)
    if model.activation == "gelu_tanh":
        return inner * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
    return inner * 0.5 * (1 + torch.erf(inner / 2**0.5))


def _moe(weights, prefix, model, hidden, auxiliary):
    """A layer with experts, computed token by token and expert by expert.

    Tokens come in the order of positions, which decides the drops.
    """
    tokens = hidden.transpose(0, 1).reshape(-1, hidden.shape[-1])
    logits = tokens @ weights[f"{prefix}router.weight"].T
    is_sinkhorn = model.moe_router_load_balancing_type == "sinkhorn"
    chosen = [
        sorted(range(model.num_experts), key=lambda expert: (-float(row[expert]), expert))[: model.moe_router_topk]
        for row in (sinkhorn(logits.detach()) if is_sinkhorn else logits.detach())
    ]
    choices = [
        (token, expert, _router_weight(row, experts, place, model))
        for token, (row, experts) in enumerate(zip(logits, chosen, strict=True))
        for place, expert in enumerate(experts)
    ]
    if auxiliary is not None:
        count = hidden.shape[0] if model.moe_router_load_balancing_type == "seq_aux_loss" else 1
        parts = [
            _auxiliary_loss(logits[part::count], [choice for choice in choices if choice[0] % count == part], model)
            for part in range(count)
        ]
        auxiliary.append(sum(parts) / len(parts))
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
    shared = _mlp(_Part(weights, f"{prefix}shared_expert."), model, hidden)
    if model.moe_shared_expert_gate:
        shared = torch.sigmoid(hidden @ weights[f"{prefix}shared_expert_gate.weight"].t()) * shared
    return mixed + shared


def sinkhorn(logits):
    """Megatron-LM's formula, one sum at a time."""
    cost = [[math.exp(value) for value in row] for row in logits.tolist()]
    places, experts = range(len(cost)), range(len(cost[0]))
    columns, change = [1.0] * len(experts), math.inf
    while change > 1e-4:
        rows = [1 / len(places) / (sum(columns[e] * cost[t][e] for e in experts) + 1e-8) for t in places]
        before = columns
        columns = [1 / len(experts) / (sum(rows[t] * cost[t][e] for t in places) + 1e-8) for e in experts]
        change = sum(abs(old - new) for old, new in zip(before, columns, strict=True)) / len(experts)
    return torch.tensor([[columns[e] * cost[t][e] * rows[t] for e in experts] for t in places], dtype=torch.float64)


def _router_weight(row, experts, place, model):
    if model.moe_router_load_balancing_type == "sinkhorn":
        all_scores = torch.exp(row) / torch.exp(row).sum()
        return 1 / (1 + torch.exp(-row[experts[0]])) if len(experts) == 1 else all_scores[experts[place]]
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
