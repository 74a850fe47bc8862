"""TrainConfig: everything a training run is told, as one frozen value, checked at birth.

Keys are Megatron-LM's flag names in snake_case, and so are the defaults, so that a published script moves over as it
stands. This module and everything it imports stays free of torch: llmctl checks a job with it before the queue.
A value's own range stands on its field; relations between keys and to the size of the job in trainer.config_checks.
"""

# Annotations are evaluated here on purpose: turned into strings, pydantic would compile each of them again at start-up.
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from trainer.config_checks import check_relations, check_world_size
from trainer.config_error import ConfigError

__all__ = [
    "ConfigError",
    "TrainConfig",
    "build_config",
    "known_keys",
    "load_config",
    "read_yaml",
    "unknown_key_problem",
]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, str) and annotation == list[str]:
            return [value]
        # YAML's true is Python's 1: a switch where a number belongs is a slip of the pen, not a one.
        if isinstance(value, bool) and annotation is not bool and not isinstance(annotation, type(Section)):
            raise ValueError("a number or a name belongs here, not a switch")
        return value


class JobConfig(Section):
    """What ``llmctl submit`` asks the cluster for. The trainer itself reads none of it."""

    name: str | None = None
    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None
    time: str | None = None
    group: str | None = None
    resource_type: str | None = None
    queue: str | None = None
    reservation: str | None = None
    priority: int | None = None
    container: str | None = None
    mounts: list[str] = []
    launcher: Literal["torchrun", "srun", "mpirun"] | None = None
    env: dict[str, str] = {}
    secrets: list[str] = []
    code: list[str] = []


class ModelConfig(Section):
    """Shape of a decoder-only transformer."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    ffn_hidden_size: PositiveInt | None = None
    """Unset: 4 x hidden_size, or with swiglu the 64-multiple below 8/3 x hidden_size, as in Megatron-LM."""
    kv_channels: PositiveInt | None = None
    """Width of one head. Unset: hidden_size / num_attention_heads."""
    group_query_attention: bool = False
    num_query_groups: PositiveInt | None = None
    """Number of key/value heads. Setting it switches group_query_attention on."""
    max_position_embeddings: PositiveInt | None = None
    """Unset: training.seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    rotary_base: PositiveFloat = 10000.0
    rotary_percent: float = Field(1.0, gt=0.0, le=1.0)
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: PositiveFloat = 1e-5
    swiglu: bool = False
    openai_gelu: bool = False
    """GeLU by its tanh approximation, as in the published GPT-2 weights (gelu_new). Unset: the exact GeLU."""
    disable_bias_linear: bool = False
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    attention_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    hidden_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    init_method_std: PositiveFloat = 0.02
    vocab_size: PositiveInt | None = None
    """Unset: the tokenizer's, as the data's manifest states it. With NullTokenizer: how many numbers it takes; the
    model then knows one token more, which ends documents."""
    make_vocab_size_divisible_by: PositiveInt = 128

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer, with the default filled in."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(self.hidden_size * 8 / 3) // 64 * 64 or 64 if self.swiglu else 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    def padded_vocab_size(self, vocab_size: int, tp: int) -> int:
        """Rows of the embedding table: ``vocab_size`` rounded up so that each of ``tp`` ranks holds as many.

        The added rows never take part in the loss (see trainer.tensor_parallel.cross_entropy), so that the loss does
        not depend on how far a layout makes us round.
        """
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-vocab_size // multiple) * multiple


class ParallelConfig(Section):
    """How the job's ranks are divided: world size = tp x pp x dp."""

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel regions along the sequence. Without effect when tp is 1."""
    overlap_grad_reduce: bool = True
    """Start reducing a gradient bucket as soon as backward has filled it."""
    ddp_bucket_size: PositiveInt | None = None
    """Elements per gradient bucket. Unset: max(40 million, 1 million x dp), as in Megatron-LM."""
    distributed_timeout_minutes: PositiveFloat = 10.0


class TrainingConfig(Section):
    """Batch sizes, length, precision and evaluation."""

    train_iters: NonNegativeInt
    seq_length: PositiveInt
    micro_batch_size: PositiveInt = 1
    global_batch_size: PositiveInt | None = None
    """Samples per iteration. Unset: micro_batch_size x dp, so that it fits any number of nodes."""
    bf16: bool = False
    fp16: bool = False
    loss_scale: PositiveFloat | None = None
    """Constant fp16 loss scale. Unset: dynamic."""
    initial_loss_scale: PositiveFloat = 2.0**32
    min_loss_scale: PositiveFloat = 1.0
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    seed: NonNegativeInt = 1234
    eval_interval: PositiveInt = 1000
    eval_iters: NonNegativeInt = 100
    """Iterations of one evaluation; 0 evaluates never."""
    exit_interval: PositiveInt | None = None
    """Save and leave when the iteration is a multiple of this."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic_mode: bool = False


class OptimizerConfig(Section):
    """Optimizer, learning rate and clipping."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: PositiveFloat
    min_lr: NonNegativeFloat = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    lr_decay_iters: PositiveInt | None = None
    """Unset: training.train_iters."""
    lr_warmup_iters: NonNegativeInt = 0
    lr_warmup_fraction: float | None = Field(None, ge=0.0, le=1.0)
    """Warmup as a share of lr_decay_iters; instead of lr_warmup_iters."""
    lr_warmup_init: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.01
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    adam_eps: PositiveFloat = 1e-8
    sgd_momentum: float = Field(0.9, ge=0.0, lt=1.0)
    clip_grad: NonNegativeFloat = 1.0
    """Largest norm of the whole model's gradient; 0 clips never."""


class DataConfig(Section):
    """Where the tokens come from."""

    data_path: list[str] = []
    """Prefixes of Megatron .bin/.idx pairs, divided into train, valid and test by ``split``. One prefix at present."""
    train_data_path: list[str] = []
    valid_data_path: list[str] = []
    split: str = "969,30,1"
    mock_data: bool = False
    """Train on a generated, learnable token stream, so that a cluster can be tried without any data."""
    tokenizer_type: Literal["HuggingFaceTokenizer", "NullTokenizer"] = "HuggingFaceTokenizer"
    tokenizer_model: str | None = None
    """A tokenizer.json, or a folder that holds one. Not needed where the data's manifest or vocab_size tells all."""
    eod_mask_loss: bool = False
    data_cache_path: str | None = None
    """Folder for index caches. Unset: ``cache`` beside the data, or in the run directory when that is read-only."""

    @field_validator("tokenizer_type", mode="before")
    @classmethod
    def _check_tokenizer_type(cls, value: Any) -> Any:
        if value not in ("HuggingFaceTokenizer", "NullTokenizer"):
            raise ValueError(
                "convert the tokenizer to a tokenizer.json for HuggingFaceTokenizer, or use NullTokenizer; data that "
                "is tokenized already needs neither tokenizer key, but model.vocab_size"
            )
        return value


class CheckpointConfig(Section):
    """Where checkpoints go and come from."""

    save: str | None = None
    """Unset: ``checkpoints`` in the run directory; without one, nothing is saved."""
    load: str | None = None
    """Start from the latest checkpoint found here, unless ``save`` already holds one of this very run."""
    save_interval: PositiveInt | None = None
    """Iterations between checkpoints. Unset: only at the end."""
    keep_last: PositiveInt | None = None
    """Delete all but the newest N checkpoints. Unset: keep all."""
    finetune: bool = False
    """Take only the weights from ``load``: iteration, optimizer, data position and RNG start anew."""
    no_load_optim: bool = False
    no_load_rng: bool = False
    no_save_optim: bool = False


class LoggingConfig(Section):
    """What is written while the run goes on."""

    log_interval: PositiveInt = 1
    peak_tflops: PositiveFloat | None = None
    """Peak of one device in TFLOP/s that MFU is measured against. Unset: known for the GPU found, else no MFU."""


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
        return world_size // (self.parallel.tensor_model_parallel_size * self.parallel.pipeline_model_parallel_size)

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
