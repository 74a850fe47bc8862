"""Pipeline schedule, virtual stages and placement that a config selects. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.schedule.placement import Placement, default_chunks, placement_of
from trainer.planning.stage_layout import parse_stage_layout

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


def virtual_stages_per_rank(config: TrainConfig) -> int:
    """Number of model chunks on each pipeline rank."""
    parallel = config.parallel
    if parallel.pipeline_schedule == "zb-v":
        return default_chunks(parallel.pipeline_schedule)
    if parallel.pipeline_model_parallel_layout is not None:
        stages = len(parse_stage_layout(parallel.pipeline_model_parallel_layout))
        return max(1, stages // parallel.pipeline_model_parallel_size)
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        per_rank = config.model.num_layers // parallel.pipeline_model_parallel_size
        return max(1, per_rank // parallel.num_layers_per_virtual_pipeline_stage)
    return parallel.num_virtual_stages_per_pipeline_rank or 1


def pipeline_schedule(config: TrainConfig) -> str:
    """Name of the pipeline schedule, with the default filled in."""
    return config.parallel.pipeline_schedule or ("interleaved" if virtual_stages_per_rank(config) > 1 else "1f1b")


def pipeline_placement(config: TrainConfig) -> Placement:
    """Placement of the virtual stages on the pipeline ranks."""
    pp = config.parallel.pipeline_model_parallel_size
    return placement_of(pipeline_schedule(config), pp, virtual_stages_per_rank(config))
