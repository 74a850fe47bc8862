"""Parameters that one rank holds, as trainer.parallel_model.build_model makes them. Torch-free.

Legend: H hidden, A heads, G query groups, D head width, t tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.planning.parts import block, embedding, norm
from trainer.planning.pipeline import pipeline_placement
from trainer.planning.stage_partition import partition_layers

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


@dataclass(frozen=True)
class RankParameters:
    """Elements of one rank's parameters.

    Attributes:
        dense: those that all ranks of dp x cp hold.
        experts: those that only the ranks of expert_dp hold.
        largest_unit: of the largest layer or table, which ZeRO-3 gathers at once.
    """

    dense: int
    experts: int
    largest_unit: int

    @property
    def total(self) -> int:
        """All elements."""
        return self.dense + self.experts

    def shard(self, config: TrainConfig, world_size: int) -> float:
        """Elements that a rank keeps of those that its copies hold too, if they share them evenly."""
        copies, of_experts = copies_of(config, world_size)
        return self.dense / copies + self.experts / of_experts


def copies_of(config: TrainConfig, world_size: int) -> tuple[int, int]:
    """Ranks with the same dense parameters, and ranks with the same experts."""
    parallel = config.parallel
    copies = config.data_parallel_size(world_size) * parallel.context_parallel_size
    return copies, max(1, copies * parallel.expert_shares // parallel.expert_model_parallel_size)


def layer_parameters(config: TrainConfig, layer: int) -> tuple[int, int]:
    """Elements of one layer on a tp rank: those of all ranks, and those of its experts."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    hidden, width = model.hidden_size, model.head_dim
    heads, groups = model.num_attention_heads // tp, max(1, model.query_groups // tp)
    packed = (heads + 2 * groups) * width
    dense = packed * (hidden + model.has_qkv_bias) + heads * width * hidden + heads * model.attention_sinks
    dense += hidden * model.has_attention_output_bias + norm.layer_parameters(model)
    if model.qk_layernorm:
        per_head = model.qk_layernorm_scope == "head"
        dense += sum(norm.parameters(model, part) for part in ((width,) * 2 if per_head else _all_heads(config)))
    if not model.is_moe_layer(layer):
        return dense + _feed_forward(config, model.ffn_size, tp), 0
    count = model.num_experts or 0
    dense += (hidden + model.moe_router_bias) * count
    if model.moe_shared_expert_intermediate_size:
        dense += _feed_forward(config, model.moe_shared_expert_intermediate_size, tp)
        dense += hidden * model.moe_shared_expert_gate
    each = _feed_forward(config, model.expert_ffn_size, config.parallel.expert_tp)
    return dense, count // config.parallel.expert_model_parallel_size * each


def _all_heads(config: TrainConfig) -> tuple[int, int]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    return model.num_attention_heads // tp * model.head_dim, max(1, model.query_groups // tp) * model.head_dim


def _feed_forward(config: TrainConfig, ffn: int, tp: int) -> int:
    model = config.model
    own = ffn // tp
    inner = own * (2 if model.is_gated else 1)
    biases = 0 if model.disable_bias_linear else inner + model.hidden_size
    return model.hidden_size * (inner + own) + biases


def parameters_of_ranks(config: TrainConfig, vocab_size: int) -> list[RankParameters]:
    """Parameters of the ranks of each pipeline rank; all ranks of one hold equally many."""
    layers = partition_layers(config, vocab_size)
    return [_rank_parameters(config, vocab_size, layers, rank) for rank in range(pipeline_placement(config).pp)]


def _rank_parameters(config: TrainConfig, vocab_size: int, layers: Sequence[range], pp_rank: int) -> RankParameters:
    model, placement = config.model, pipeline_placement(config)
    tp = config.parallel.tensor_model_parallel_size
    stages = [placement.virtual_stage(pp_rank, chunk) for chunk in range(placement.chunks)]
    rows = model.padded_vocab_size(vocab_size, tp) // tp
    table = rows * embedding.word_width(model)
    of_kind = {block.kind_of(model, layer): layer for stage in stages for layer in layers[stage]}
    known = {kind: layer_parameters(config, layer) for kind, layer in of_kind.items()}
    per_layer = [known[block.kind_of(model, layer)] for stage in stages for layer in layers[stage]]
    dense, experts = (sum(part) for part in zip(*per_layer, strict=True)) if per_layer else (0, 0)
    is_first, is_last = 0 in stages, placement.num_virtual_stages - 1 in stages
    if is_first:
        further = embedding.table_parameters(model, 0, config.max_position_embeddings)
        dense += table + further + embedding.parameters(model)
    if is_last:
        dense += norm.parameters(model) if model.has_final_norm else 0
        dense += model.embedding_size * model.hidden_size if model.embedding_size else 0
        dense += rows * model.has_head_bias
        dense += table if model.untie_embeddings_and_output_weights or not is_first else 0
    largest = max([table if is_first or is_last else 0, *map(sum, per_layer)])
    return RankParameters(dense, experts, largest)
