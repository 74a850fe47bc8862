"""Sections of TrainConfig, one file each.

A field checks its own range; trainer.planning.checks checks relations between keys. No file here has
"from __future__ import annotations": pydantic would compile every annotation string again at start-up.
"""

from trainer.config.sections.checkpoint import CheckpointConfig
from trainer.config.sections.data import DataConfig
from trainer.config.sections.evaluation import EvaluationConfig
from trainer.config.sections.job import JobConfig
from trainer.config.sections.logging import LoggingConfig
from trainer.config.sections.model import ModelConfig
from trainer.config.sections.optimizer import OptimizerConfig
from trainer.config.sections.parallel import ParallelConfig
from trainer.config.sections.section import Section
from trainer.config.sections.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "JobConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Section",
    "TrainingConfig",
]
