"""The run summary before the first step: size, layout, schedule, saved and sharded state.

Torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.flops import count_parameters
from trainer.planning.parts.attention import keeps_scores
from trainer.planning.pipeline import pipeline_placement, pipeline_schedule
from trainer.planning.stage_partition import partition_layers

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.train_config import TrainConfig
    from trainer.distributed.mesh import ParallelMesh

_SHARDED = ("", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights")


def summarize_run(config: TrainConfig, mesh: ParallelMesh, vocab_size: int, device: str) -> list[str]:
    """A line on model and job, and if needed one on the division of work.

    Args:
        config: the training config.
        mesh: the axes of the job.
        vocab_size: tokens of the vocabulary, without padding.
        device: name of the ranks' devices.
    """
    parameters = count_parameters(config, vocab_size)
    active = f" ({parameters.active:,} per token)" if parameters.active != parameters.total else ""
    precision = "bf16" if config.training.bf16 else "fp16" if config.training.fp16 else "fp32"
    lines = [
        f"{parameters.total:,} parameters{active}, {precision}, {_axes(config, mesh)} on {mesh.world_size} x {device}, "
        f"{_batch(config, mesh)} of {_length(config)} tokens per iteration"
    ]
    details = [*_pipeline(config, mesh, vocab_size), *_attention(config), *_memory(config, mesh)]
    return [*lines, "; ".join(details)] if details else lines


def describe_start(config: TrainConfig, restored: Path | None, iteration: int) -> list[str]:
    """A line on the weights that the run starts from; none for a run that asks for new ones.

    Args:
        config: the training config.
        restored: the checkpoint, if one was restored.
        iteration: the last iteration of the checkpoint; 0 if only its weights count.
    """
    if restored is not None and iteration == 0:
        return [f"starting from the weights of {restored}"]
    if restored is not None:
        return [f"resuming from {restored} at iteration {iteration}"]
    if config.checkpoint.load is not None:
        return [f"starting from new weights: {config.checkpoint.load} holds no checkpoint yet"]
    return []


def _length(config: TrainConfig) -> str:
    training = config.training
    return f"{training.seq_length}" + f" and {training.decoder_seq_length}" * config.model.is_encoder_decoder


def _batch(config: TrainConfig, mesh: ParallelMesh) -> str:
    sizes = config.batch_sizes(mesh.dp)
    if sizes.are_constant:
        return f"{sizes.full} sequences"
    return f"{sizes.at(0)} to {sizes.full} sequences ({sizes.span})"


def _axes(config: TrainConfig, mesh: ParallelMesh) -> str:
    tp = f"TP {mesh.tp}"
    if mesh.tp > 1 and config.parallel.sequence_parallel:
        tp += " with sequence parallelism"
    axes = [tp, f"PP {mesh.pp}"]
    if mesh.cp > 1:
        axes.append(f"CP {mesh.cp} ({config.parallel.cp_comm_type})")
    axes.append(f"DP {mesh.dp}")
    experts = f", EP {mesh.ep}" if mesh.ep > 1 or mesh.expert_shares > 1 else ""
    return " x ".join(axes) + experts + (f" with ETP {mesh.expert_tp}" if mesh.expert_shares > 1 else "")


def _pipeline(config: TrainConfig, mesh: ParallelMesh, vocab_size: int) -> list[str]:
    placement = pipeline_placement(config)
    if placement.num_virtual_stages == 1:
        return []
    counts = [len(layers) for layers in partition_layers(config, vocab_size)]
    held = f"{counts[0]} layers each" if len(set(counts)) == 1 else f"layers {', '.join(map(str, counts))}"
    stages = f"{placement.num_virtual_stages} virtual stages" if placement.chunks > 1 else f"{placement.pp} stages"
    most = config.batch_sizes(mesh.dp).largest // (config.training.micro_batch_size * mesh.dp)
    micro_batches = f"{'up to ' if config.changes_batch_size else ''}{most}"
    return [f"pipeline {pipeline_schedule(config)}, {stages} of {held}, {micro_batches} micro-batches"]


def _attention(config: TrainConfig) -> list[str]:
    if not keeps_scores(config.model):
        return []
    backend = config.model.attention_backend
    return [f"attention_backend {backend} with attention_dropout keeps the attention scores; auto keeps none"]


def _memory(config: TrainConfig, mesh: ParallelMesh) -> list[str]:
    stage = config.parallel.zero_stage
    details = []
    if stage and mesh.data_size > 1:
        details.append(f"ZeRO-{stage}: {_SHARDED[stage]} divided over {mesh.data_size} ranks")
    if config.optimizer.optimizer_cpu_offload:
        details.append(f"{config.optimizer.optimizer_offload_fraction:.0%} of the optimizer state in CPU memory")
    if config.training.chunk_of_loss is not None:
        details.append(f"logits and loss in chunks of {config.training.chunk_of_loss} tokens")
    return [*details, *_recompute(config)]


def _recompute(config: TrainConfig) -> list[str]:
    training = config.training
    if training.recompute_granularity is None:
        return []
    if training.recompute_granularity == "full":
        number = training.recompute_num_layers or 1
        if training.recompute_method == "uniform":
            return [f"full recompute of layers in groups of {number}"]
        stage = "virtual stage" if pipeline_placement(config).chunks > 1 else "stage"
        return [f"full recompute of {number} layers per {stage}"]
    modules = training.recompute_modules or ["core_attn"]
    # A position bias too needs the scores.
    if keeps_scores(config.model) or config.model.is_encoder_decoder:
        return [f"recompute of {', '.join(modules)}"]
    others = [module for module in modules if module != "core_attn"]
    details = [f"recompute of {', '.join(others)}"] if others else []
    if len(others) < len(modules):
        details.append("nothing to recompute in core_attn, which keeps no scores")
    return details
