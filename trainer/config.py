"""TrainConfig: everything a training run is told, as one frozen value, checked at birth.

Keys are Megatron-LM's flag names in snake_case, and so are the defaults, so that a published script moves over as it
stands. This module and everything it imports stays free of torch: llmctl checks a job with it before the queue.
A value's own range stands on its field; relations between keys and to the size of the job in trainer.config_checks.
"""

# Annotations are evaluated here on purpose: turned into strings, pydantic would compile each of them again at start-up.
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator
from typing_extensions import Self

from trainer.config_checks import check_relations, check_world_size
from trainer.config_error import ConfigError
from trainer.config_sections import (
    CheckpointConfig,
    DataConfig,
    JobConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Section,
    TrainingConfig,
)
from trainer.data_checks import path_entries, weight_places
from trainer.pipeline.placement import Placement, default_chunks, placement_of

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "JobConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
    "TrainingConfig",
    "build_config",
    "known_keys",
    "load_config",
    "path_entries",
    "read_yaml",
    "unknown_key_problem",
    "weight_places",
]


class TrainConfig(Section):
    """The whole training config: one section per concern, equal after a round trip through YAML."""

    job: JobConfig = JobConfig()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence that the position embedding knows."""
        return self.model.max_position_embeddings or self.training.seq_length

    def data_parallel_size(self, world_size: int) -> int:
        """Number of model replicas among ``world_size`` ranks."""
        parallel = self.parallel
        return world_size // (
            parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
        )

    @property
    def virtual_stages_per_rank(self) -> int:
        """Chunks of the model that each rank of the pipeline holds."""
        parallel = self.parallel
        if parallel.pipeline_schedule == "zb-v":
            return default_chunks(parallel.pipeline_schedule)
        if parallel.pipeline_model_parallel_layout is not None:
            from trainer.planning.stage_layout import parse_stage_layout

            stages = len(parse_stage_layout(parallel.pipeline_model_parallel_layout))
            return max(1, stages // parallel.pipeline_model_parallel_size)
        if parallel.num_layers_per_virtual_pipeline_stage is not None:
            per_rank = self.model.num_layers // parallel.pipeline_model_parallel_size
            return max(1, per_rank // parallel.num_layers_per_virtual_pipeline_stage)
        return parallel.num_virtual_stages_per_pipeline_rank or 1

    @property
    def pipeline_schedule(self) -> str:
        """Name of the pipeline schedule, with the default filled in."""
        return self.parallel.pipeline_schedule or ("interleaved" if self.virtual_stages_per_rank > 1 else "1f1b")

    @property
    def placement(self) -> Placement:
        """Which virtual stages each rank of the pipeline holds."""
        pp = self.parallel.pipeline_model_parallel_size
        return placement_of(self.pipeline_schedule, pp, self.virtual_stages_per_rank)

    def global_batch_size(self, dp: int) -> int:
        """Samples per iteration over all ``dp`` replicas."""
        return self.training.global_batch_size or self.training.micro_batch_size * dp

    def num_micro_batches(self, dp: int) -> int:
        """Micro-batches that each replica runs per iteration."""
        return self.global_batch_size(dp) // (self.training.micro_batch_size * dp)

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        check_relations(self)
        return self

    def check_world_size(self, world_size: int) -> None:
        """Refuse a layout or batch size that does not fit ``world_size`` ranks.

        Raises:
            ConfigError: names the numbers and the nearest that fit.
        """
        check_world_size(self, world_size)


def build_config(values: Mapping[str, Any]) -> TrainConfig:
    """TrainConfig from nested plain values, as YAML gives them.

    Raises:
        ConfigError: the first thing that is wrong, by key; unknown keys come with the nearest valid one.
    """
    try:
        return TrainConfig.model_validate(dict(values))
    except ValidationError as error:
        raise _config_error(error) from None


def _config_error(error: ValidationError) -> ConfigError:
    # Unknown keys first: a misspelt key is also a missing one, and the misspelling is the mistake.
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    if first["type"] == "extra_forbidden":
        return ConfigError(key, unknown_key_problem(key))
    if first["type"] == "missing":
        return ConfigError(key, "is missing and has no default; set it")
    message = str(cause) if cause else first["msg"][:1].lower() + first["msg"][1:]
    return ConfigError(key, f"{first['input']!r} is not valid: {message}")


def known_keys() -> tuple[str, ...]:
    """Every dotted key of the training config."""
    return tuple(
        f"{section}.{key}"
        for section, field in TrainConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        for key in field.annotation.model_fields
    )


def unknown_key_problem(key: str) -> str:
    """One sentence for a dotted key that does not exist, naming the nearest that does."""
    section, _, name = key.rpartition(".")
    sections = tuple(TrainConfig.model_fields)
    if not section:
        near = difflib.get_close_matches(name, sections, n=1, cutoff=0.6)
        near = near or [known for known in known_keys() if known.endswith(f".{name}")]
    else:
        near = [known for known in known_keys() if known.endswith(f".{name}")]
        near = near or difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.5)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    if section not in sections:
        return f"unknown key; the sections are {', '.join(sections)}"
    return (
        f"unknown key; {section} has {', '.join(k.rpartition('.')[2] for k in known_keys() if k.startswith(section))}"
    )


def load_config(path: Path) -> TrainConfig:
    """TrainConfig from a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not a YAML mapping, or holds a value that cannot be used.
    """
    return build_config(read_yaml(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping of sections that a YAML file holds, unchecked.

    Raises:
        ConfigError: the file cannot be read, is not YAML, names a key twice, or is not a mapping.
    """
    import yaml

    class UniqueKeyLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Refuses a key that is given twice, of which PyYAML would silently keep the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise yaml.MarkedYAMLError(problem=f"key {twice!r} is given twice", problem_mark=node.start_mark)
            return dict(super().construct_mapping(node, deep))

    try:
        values = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("", f"cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError("", f"is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError("", f"is not a mapping of the sections {', '.join(TrainConfig.model_fields)}")
    return values
