"""Checkpoints as Megatron-core's torch_dist writes them, by torch.distributed.checkpoint: names, shapes and chunks.

Written from megatron/core/models/gpt/gpt_model.py, transformer_block.py and mlp.py (sharded_state_dict), apart from the
product's table. Legend: L layers, G groups of queries, F feed-forward width.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

Weights = Mapping[str, Tensor]


class Backend(Enum):
    """Stands for the classes of Megatron-LM that its arguments hold."""

    FLASH = 1


def packed(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """linear_qkv: for each group its queries, then its key, then its value."""
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def of_llama(hub: Weights, layers: int, groups: int) -> dict[str, Tensor]:
    """With Transformer Engine's layers, whose products hold the norm before them; layers stacked."""

    def stacked(make: Any) -> Tensor:
        return torch.stack([make(f"model.layers.{layer}.") for layer in range(layers)])

    attention = "decoder.layers.self_attention"
    return {
        "embedding.word_embeddings.weight": hub["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hub["model.norm.weight"],
        "output_layer.weight": hub["lm_head.weight"],
        f"{attention}.linear_qkv.weight": stacked(
            lambda at: packed(*(hub[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"), groups)
        ),
        f"{attention}.linear_qkv.layer_norm_weight": stacked(lambda at: hub[f"{at}input_layernorm.weight"]),
        f"{attention}.linear_proj.weight": stacked(lambda at: hub[f"{at}self_attn.o_proj.weight"]),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": stacked(
            lambda at: hub[f"{at}post_attention_layernorm.weight"]
        ),
        "decoder.layers.mlp.linear_fc1.weight": stacked(
            lambda at: torch.cat([hub[f"{at}mlp.gate_proj.weight"], hub[f"{at}mlp.up_proj.weight"]])
        ),
        "decoder.layers.mlp.linear_fc2.weight": stacked(lambda at: hub[f"{at}mlp.down_proj.weight"]),
    }


def of_gpt2(hub: Weights, layers: int, heads: int) -> dict[str, Tensor]:
    """With local layers, which hold their norms themselves; layers numbered, as since Megatron-core 0.14."""
    made = {
        "embedding.word_embeddings.weight": hub["transformer.wte.weight"],
        "embedding.position_embeddings.weight": hub["transformer.wpe.weight"],
    }
    for what in ("weight", "bias"):
        made[f"decoder.final_layernorm.{what}"] = hub[f"transformer.ln_f.{what}"]
        for layer in range(layers):
            ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
            qkv = hub[f"{theirs}.attn.c_attn.{what}"].t().chunk(3)
            made[f"{ours}.self_attention.linear_qkv.{what}"] = packed(*qkv, heads)
            for mine, other in (
                ("input_layernorm", "ln_1"),
                ("self_attention.linear_proj", "attn.c_proj"),
                ("pre_mlp_layernorm", "ln_2"),
                ("mlp.linear_fc1", "mlp.c_fc"),
                ("mlp.linear_fc2", "mlp.c_proj"),
            ):
                made[f"{ours}.{mine}.{what}"] = hub[f"{theirs}.{other}.{what}"].t()
    return made


def of_mixtral(hub: Weights, layers: int, groups: int, experts: int) -> dict[str, Tensor]:
    """With grouped experts, [L, E, ...]. The layers' other tensors are those of Llama."""

    def stacked(make: Any) -> Tensor:
        numbers = [f"model.layers.{layer}.block_sparse_moe." for layer in range(layers)]
        return torch.stack(
            [torch.stack([make(f"{at}experts.{expert}.") for expert in range(experts)]) for at in numbers]
        )

    zero = {
        f"model.layers.{n}.mlp.{p}_proj.weight": torch.zeros(1, 1)
        for n in range(layers)
        for p in ("gate", "up", "down")
    }
    made = of_llama({**hub, **zero}, layers, groups)
    del made["decoder.layers.mlp.linear_fc1.weight"], made["decoder.layers.mlp.linear_fc2.weight"]
    made["decoder.layers.pre_mlp_layernorm.weight"] = made.pop("decoder.layers.mlp.linear_fc1.layer_norm_weight")
    gates = [hub[f"model.layers.{layer}.block_sparse_moe.gate.weight"] for layer in range(layers)]
    made["decoder.layers.mlp.router.weight"] = torch.stack(gates)
    first = stacked(lambda at: torch.cat([hub[f"{at}w1.weight"], hub[f"{at}w3.weight"]]))
    made["decoder.layers.mlp.experts.experts.linear_fc1.weight"] = first
    made["decoder.layers.mlp.experts.experts.linear_fc2.weight"] = stacked(lambda at: hub[f"{at}w2.weight"])
    return made


def write(rank: int, world_size: int, folder: Path, weights: Weights, arguments: Mapping[str, Any]) -> None:
    """Write the folder; each rank holds its part of the rows, layer by layer. All ranks call it."""
    state = {key: _sharded(key, tensor, rank, world_size) for key, tensor in weights.items()}
    checkpoint.save(
        {**state, "optimizer.state.exp_avg.output_layer.weight": torch.zeros(3), "rng_state/shard_0_1": [1, 2]},
        storage_writer=checkpoint.FileSystemWriter(folder),
    )
    if rank == 0:
        named = argparse.Namespace(**arguments, attention_backend=Backend.FLASH, params_dtype=torch.bfloat16)
        torch.save({"args": named, "iteration": 100, "checkpoint_version": 3.0}, folder / "common.pt")
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("100")


def _sharded(key: str, tensor: Tensor, rank: int, world_size: int) -> ShardedTensor:
    """A tensor whose stacked layers are chunks of their own, divided over ranks by rows."""
    is_stacked = "decoder.layers." in key and not key.split(".")[2].isdigit()
    layers = range(len(tensor)) if is_stacked else [None]
    row_dim = 1 if is_stacked else 0
    parts = world_size if tensor.shape[row_dim] % world_size == 0 else 1
    rows = tensor.shape[row_dim] // parts
    local, described = [], []
    for layer in layers:
        for part in range(parts):
            offset, shape = [0] * tensor.dim(), list(tensor.shape)
            if layer is not None:
                offset[0], shape[0] = layer, 1
            offset[row_dim], shape[row_dim] = part * rows, rows
            place = ShardMetadata(offset, shape, f"rank:{part}/cpu")
            described.append(place)
            if part == rank:
                box = tensor if layer is None else tensor[layer : layer + 1]
                local.append(Shard(box.narrow(row_dim, part * rows, rows).contiguous(), place))
    properties = TensorProperties(dtype=tensor.dtype)
    whole = ShardedTensorMetadata(described, tensor.shape, properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, whole, process_group=dist.group.WORLD)
