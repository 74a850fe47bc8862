"""Attention: queries, keys and values of heads, or from low-rank products (multi-latent attention). Torch-free.

Legend: H hidden, A heads, G query groups, D head width, s tokens of a sequence.
Multi-latent attention: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.parts import norm

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

TILE = 512
"""Tokens within which attention kernels gain nothing from the causal mask.

Counted without a discount for the mask, attention takes 1.4 to 1.5 times as long as matrix products of equal FLOPs for
256 or 512 tokens, and 1.07 times for 2048: the mask's savings and the kernel's lower efficiency cancel out.
"""

ALIBI_CHANNELS = 8
"""Channels behind those of each query and key that give the bias; see trainer.model.linear_bias."""


def parameters(model: ModelConfig) -> int:
    """Parameters of one layer's attention, without the norms before and after it."""
    if model.multi_latent_attention:
        return _latent(model)
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.query_groups
    width, packed = heads * model.head_dim, (heads + 2 * groups) * model.head_dim
    total = hidden * packed + width * hidden
    total += packed * model.has_qkv_bias + hidden * model.has_attention_output_bias
    if model.qk_layernorm:
        widths = (model.head_dim,) * 2 if model.qk_layernorm_scope == "head" else (width, groups * model.head_dim)
        total += sum(norm.parameters(model, each) for each in widths)
    return total + heads * model.attention_sinks


def _latent(model: ModelConfig) -> int:
    hidden, heads = model.hidden_size, model.num_attention_heads
    query, value = widths(model)
    rank, rotated = model.kv_lora_rank or 0, model.qk_pos_emb_head_dim or 0
    total = hidden * (rank + rotated) + norm.parameters(model, rank)
    total += (
        rank * heads * (query - rotated + value) + heads * value * hidden + hidden * model.has_attention_output_bias
    )
    if model.q_lora_rank is None:
        return total + hidden * heads * query
    return total + (hidden + heads * query) * model.q_lora_rank + norm.parameters(model, model.q_lora_rank)


def widths(model: ModelConfig) -> tuple[int, int]:
    """Width of a query (and key) head, and of a value head."""
    if not model.multi_latent_attention:
        return model.head_dim, model.head_dim
    return (model.qk_head_dim or 0) + (model.qk_pos_emb_head_dim or 0), model.v_head_dim or 0


def kernel_widths(model: ModelConfig) -> tuple[int, int]:
    """``widths`` as attention kernels get them: with the channels of ALiBi."""
    query, value = widths(model)
    return (query + ALIBI_CHANNELS if model.position_embedding_type == "alibi" else query), value


def score_flops(model: ModelConfig, layer: int, length: int) -> int:
    """Operations of scores and weighted values, without a discount for the causal mask.

    6 s A (query width + value width), 12 A D s if they are equal; s is at most the layer's window. (Chowdhery et al.
    2022, PaLM, appendix B)
    """
    seen = min(length, model.window_of(layer) or length)
    return 6 * seen * model.num_attention_heads * sum(widths(model))


def score_cost(model: ModelConfig, layer: int, length: int) -> float:
    """Operations of equal time in matrix products; see ``TILE``."""
    seen = min(length, model.window_of(layer) or length)
    wider = sum(kernel_widths(model)) / sum(widths(model))
    return score_flops(model, layer, length) * wider * (1 + min(1.0, TILE / seen) / 2)


def keeps_scores(model: ModelConfig) -> bool:
    """True if attention keeps its weights for backward: causal attention that is unfused and has dropout."""
    return model.is_causal and model.attention_dropout > 0.0 and model.attention_backend in ("unfused", "local")
