"""Bytes that backward keeps of one micro-batch, as the model's fused kernels keep them. Torch-free.

Legend: n tokens of a micro-batch on a rank, H hidden, F feed-forward width, t tensor-parallel ranks. The two norms of a
layer keep their inputs, the products theirs, attention its queries, keys, values and result, the activation its input.
After Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for kernels that keep no masks and no scores; attention
keeps its scores if ``keeps_scores`` says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.parts import block
from trainer.planning.parts.attention import ALIBI_CHANNELS, keeps_scores

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

EXPERT_LOAD = 1.5
"""Tokens of the busiest rank's experts, as a multiple of an even share, without a capacity: an assumption."""
_STATISTICS = 4
_ROW_KEYS = 8
"""Bytes from which the dropout masks of a query are drawn again."""


def element_bytes(config: TrainConfig) -> int:
    """Bytes of one activation or weight in the model's dtype."""
    return 2 if config.training.bf16 or config.training.fp16 else 4


def tokens_per_rank(config: TrainConfig) -> int:
    """Tokens of one micro-batch on a rank, before sequence parallelism."""
    return config.training.micro_batch_size * config.training.seq_length // config.parallel.context_parallel_size


def layer_bytes(config: TrainConfig, layer: int) -> int:
    """Bytes that layer number ``layer`` keeps of one micro-batch, without recompute of whole layers."""
    model, training, parallel = config.model, config.training, config.parallel
    tp, size, tokens = parallel.tensor_model_parallel_size, element_bytes(config), tokens_per_rank(config)
    stream = tokens * model.hidden_size // (tp if parallel.sequence_parallel else 1) * size
    selected = frozenset[str]()
    if training.recompute_granularity == "selective":
        selected = frozenset(training.recompute_modules or ["core_attn"])
    if model.is_moe_layer(layer):
        inner, routed = _expert_bytes(config, tokens, size)
        forgets = "moe" in selected
        inner = 0 if forgets else routed + (_without_output(config, inner) if "moe_act" in selected else inner)
    else:
        inner = tokens * (3 if model.is_gated else 2) * (model.ffn_size // tp) * size
        inner = 0 if "mlp" in selected else _without_output(config, inner) if "mlp_act" in selected else inner
    norms = 2 * stream + 2 * tokens * _STATISTICS
    normed = 0 if "layernorm" in selected else 2 * stream
    extra = 2 * stream if model.norm_placement == "sandwich" else 0
    return norms + normed + extra + _attention_bytes(config, replays="core_attn" in selected) + inner


def _attention_bytes(config: TrainConfig, *, replays: bool) -> int:
    """Bytes that attention keeps: queries, keys, values and result, and what its kernel adds.

    Args:
        config: of the run.
        replays: backward computes the scores again, of a kernel that keeps them.
    """
    model, tokens, size = config.model, tokens_per_rank(config), element_bytes(config)
    tp = config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads // tp, max(1, model.query_groups // tp)
    width = model.head_dim * size
    kept = tokens * (2 * heads + 2 * groups) * width
    if model.position_embedding_type == "alibi":
        kept += tokens * (heads + groups) * ALIBI_CHANNELS * size
    if keeps_scores(model):
        # Probabilities before and after dropout, the mask, and the result in the order of heads.
        of_kernel = (2 * size + 1) * config.training.seq_length + width
        return kept if replays else kept + tokens * heads * of_kernel
    # The result in the order of heads, beside that of tokens.
    of_kernel = _STATISTICS + (width if model.attention_backend in ("unfused", "local") else 0)
    return kept + tokens * heads * (of_kernel + (_ROW_KEYS if model.attention_dropout > 0 else 0))


def _without_output(config: TrainConfig, inner: int) -> int:
    """Bytes of the activation's input, of those of input and output."""
    return inner * 2 // 3 if config.model.is_gated else inner // 2


def _expert_bytes(config: TrainConfig, tokens: int, size: int) -> tuple[int, int]:
    """Bytes of the inner channels of all experts, and of their inputs and outputs."""
    model, parallel = config.model, config.parallel
    tp = parallel.tensor_model_parallel_size
    load = EXPERT_LOAD if parallel.expert_model_parallel_size > 1 else 1.0
    if model.moe_expert_capacity_factor is not None:
        load = min(load, model.moe_expert_capacity_factor)
    rows = int(tokens * model.moe_router_topk * load) // parallel.expert_shares
    per_unit = 3 if model.is_gated else 2
    inner = rows * per_unit * (model.expert_ffn_size // parallel.expert_tp) * size
    if model.moe_shared_expert_intermediate_size:
        inner += tokens * per_unit * (model.moe_shared_expert_intermediate_size // tp) * size
    return inner, 2 * rows * model.hidden_size * size


def backward_bytes(config: TrainConfig, layer: int) -> int:
    """The most that backward of a layer holds beside what layers keep and replay: gradients, and scores drawn again.

    Gradients of the inner channels of the feed-forward part; or those of scores, when that part is done. Dropout of a
    replay draws its mask from two numbers of 32 bits for each score. As traced.
    """
    model, training, parallel = config.model, config.training, config.parallel
    tp, size, tokens = parallel.tensor_model_parallel_size, element_bytes(config), tokens_per_rank(config)
    stream = tokens * model.hidden_size // (tp if parallel.sequence_parallel else 1) * size
    if model.is_moe_layer(layer):
        inner, routed = _expert_bytes(config, tokens, size)
    else:
        inner, routed = tokens * (3 if model.is_gated else 2) * (model.ffn_size // tp) * size, 0
    most = stream + routed // 2 + (inner * 2 // 3 if model.is_gated else inner // 2)
    if not keeps_scores(model):
        return most
    scores = tokens * training.seq_length * model.num_attention_heads // tp
    if training.recompute_granularity == "selective" and "core_attn" in (training.recompute_modules or ["core_attn"]):
        return max(most, stream + 8 * scores)
    return max(most, 2 * size * scores - stream - inner - routed)


def stage_bytes(config: TrainConfig, layers: range) -> tuple[int, int]:
    """Bytes kept of one micro-batch by a virtual stage, and the most that a replay adds."""
    model, training, parallel = config.model, config.training, config.parallel
    of_kind = {block.kind_of(model, layer): layer for layer in layers}
    known = {kind: layer_bytes(config, layer) for kind, layer in of_kind.items()}
    each = [known[block.kind_of(model, layer)] for layer in layers]
    if training.recompute_granularity != "full" or not each:
        return sum(each), 0
    tp = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    stream = tokens_per_rank(config) * model.hidden_size // tp * element_bytes(config)
    count = training.recompute_num_layers or 1
    if training.recompute_method == "block":
        again = min(count, len(each))
        return again * stream + sum(each[again:]), max(each[:again])
    groups = [each[start : start + count] for start in range(0, len(each), count)]
    return len(groups) * stream, max(map(sum, groups))
