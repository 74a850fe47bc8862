"""TrainConfig: everything a training run is told, as one frozen value, checked at birth.

Keys are Megatron-LM's flag names in snake_case, and so are the defaults, so that a published script moves over as it
stands. This module and everything it imports stays free of torch: llmctl checks a job with it before the queue.
The three kinds of check live in three places: a value's own range on its field, relations between keys in
:meth:`TrainConfig._check_relations`, and relations to the size of the job in :meth:`TrainConfig.check_world_size`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import ValidationError, model_validator
from typing_extensions import Self

from trainer.planning.layouts import nearest_layouts


class ConfigError(ValueError):
    """A value of the training config that cannot be used.

    Attributes:
        key: dotted key of the culprit, as in ``parallel.tensor_model_parallel_size``; empty if none can be named.
        problem: one sentence: what is wrong, what is valid, what to do. Names no file: the caller knows it.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key = key
        self.problem = problem


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


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
    disable_bias_linear: bool = False
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    attention_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    hidden_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    init_method_std: PositiveFloat = 0.02
    vocab_size: PositiveInt | None = None
    """Unset: the tokenizer's, as the data's manifest states it."""
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
    """A tokenizer.json, or a folder that holds one."""
    eod_mask_loss: bool = False
    data_cache_path: str | None = None
    """Folder for index caches. Unset: ``cache`` beside the data, or in the run directory when that is read-only."""


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
        _check_attention(self.model)
        _check_tensor_parallel(self)
        _check_pipeline(self)
        _check_training(self)
        _check_optimizer(self)
        _check_data(self.data)
        return self

    def check_world_size(self, world_size: int) -> None:
        """Refuse a layout or batch size that does not fit ``world_size`` ranks.

        Raises:
            ConfigError: names the numbers and the nearest that fit.
        """
        tp, pp = self.parallel.tensor_model_parallel_size, self.parallel.pipeline_model_parallel_size
        if world_size % (tp * pp):
            fitting = nearest_layouts(world_size, tp, pp, _tp_divisors(self.model), self.model.num_layers)
            raise ConfigError(
                "parallel.tensor_model_parallel_size",
                f"TP {tp} x PP {pp} = {tp * pp} does not divide the world size {world_size}; nearest layouts that fit: "
                + "; ".join(f"TP {t} x PP {p} x DP {world_size // (t * p)}" for t, p in fitting),
            )
        dp = self.data_parallel_size(world_size)
        global_batch_size, step = self.global_batch_size(dp), self.training.micro_batch_size * dp
        if global_batch_size % step:
            below, above = global_batch_size // step * step, -(-global_batch_size // step) * step
            raise ConfigError(
                "training.global_batch_size",
                f"{global_batch_size} is not divisible by micro_batch_size {self.training.micro_batch_size} x DP {dp} "
                f"= {step}; use {f'{below} or {above}' if below else above}",
            )


def _divisors(number: int) -> str:
    found = [d for d in range(1, number + 1) if number % d == 0]
    return ", ".join(map(str, found if len(found) <= 12 else [*found[:11], "...", number]))


def _tp_divisors(model: ModelConfig) -> tuple[int, ...]:
    return (model.num_attention_heads, model.query_groups, model.ffn_size)


def _check_attention(model: ModelConfig) -> None:
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        raise ConfigError(
            "model.num_attention_heads",
            f"{heads} heads do not divide hidden_size {model.hidden_size}; use one of {_divisors(model.hidden_size)}, "
            "or set model.kv_channels",
        )
    if heads % model.query_groups:
        raise ConfigError(
            "model.num_query_groups",
            f"{model.query_groups} query groups do not divide {heads} attention heads; use one of {_divisors(heads)}",
        )
    if model.group_query_attention and model.num_query_groups is None:
        raise ConfigError(
            "model.num_query_groups", "is needed with group_query_attention; use one of " + _divisors(heads)
        )
    if model.position_embedding_type == "rope" and int(model.head_dim * model.rotary_percent) % 2:
        raise ConfigError(
            "model.rotary_percent",
            f"rotates {int(model.head_dim * model.rotary_percent)} of {model.head_dim} channels per head, which is odd; "
            "choose head width and share so that it is even",
        )


def _check_tensor_parallel(config: TrainConfig) -> None:
    tp, model = config.parallel.tensor_model_parallel_size, config.model
    key = "parallel.tensor_model_parallel_size"
    for size, name in (
        (model.num_attention_heads, "num_attention_heads"),
        (model.query_groups, "num_query_groups"),
        (model.ffn_size, "ffn_hidden_size"),
    ):
        if size % tp:
            raise ConfigError(key, f"{tp} does not divide model.{name} {size}; use one of {_divisors(size)}")
    if config.parallel.sequence_parallel and config.training.seq_length % tp:
        raise ConfigError(
            "training.seq_length",
            f"{config.training.seq_length} is not divisible by tensor_model_parallel_size {tp}, which sequence_parallel "
            f"needs; use {config.training.seq_length // tp * tp or tp} or switch parallel.sequence_parallel off",
        )


def _check_pipeline(config: TrainConfig) -> None:
    layers, pp = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    if layers % pp:
        below, above = layers // pp * pp, -(-layers // pp) * pp
        raise ConfigError(
            "parallel.pipeline_model_parallel_size",
            f"{pp} does not divide model.num_layers {layers}; use one of {_divisors(layers)}, "
            f"or {f'{below} or {above}' if below else above} layers",
        )


def _check_training(config: TrainConfig) -> None:
    training, model = config.training, config.model
    if training.bf16 and training.fp16:
        raise ConfigError("training.fp16", "bf16 and fp16 exclude each other; switch one off")
    if model.position_embedding_type == "learned_absolute" and config.max_position_embeddings < training.seq_length:
        raise ConfigError(
            "model.max_position_embeddings",
            f"{config.max_position_embeddings} is below training.seq_length {training.seq_length}; raise it to that",
        )
    if training.min_loss_scale > training.initial_loss_scale:
        raise ConfigError(
            "training.min_loss_scale", f"must not exceed initial_loss_scale {training.initial_loss_scale:g}"
        )


def _check_optimizer(config: TrainConfig) -> None:
    optimizer = config.optimizer
    decay_iters = optimizer.lr_decay_iters or config.training.train_iters
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError("optimizer.min_lr", f"{optimizer.min_lr:g} is above lr {optimizer.lr:g}; lower it")
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_iters:
        raise ConfigError("optimizer.lr_warmup_fraction", "excludes lr_warmup_iters; set only one of the two")
    if optimizer.lr_decay_style != "constant" and 0 < decay_iters < optimizer.lr_warmup_iters:
        raise ConfigError(
            "optimizer.lr_warmup_iters",
            f"{optimizer.lr_warmup_iters} is beyond the {decay_iters} iterations that the learning rate decays over; "
            "lower it or raise optimizer.lr_decay_iters",
        )


def _check_data(data: DataConfig) -> None:
    sources = [name for name in ("data_path", "train_data_path", "mock_data") if getattr(data, name)]
    if len(sources) > 1:
        raise ConfigError(f"data.{sources[1]}", f"excludes data.{sources[0]}; set only one of the two")
    for name in ("data_path", "train_data_path", "valid_data_path"):
        if len(getattr(data, name)) > 1:
            raise ConfigError(f"data.{name}", "takes one prefix; merge the others into it")
    if data.valid_data_path and not data.train_data_path:
        raise ConfigError("data.valid_data_path", "goes with data.train_data_path, which is unset")
    parse_split(data.split)


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of the train, valid and test split, summing to 1, from Megatron's ``949,50,1``.

    Raises:
        ConfigError: anything but one to three non-negative numbers, separated by commas, with a sum above zero.
    """
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    weights += [0.0] * (3 - len(weights)) if weights else []
    if len(weights) != 3 or not all(0 <= weight < float("inf") for weight in weights) or not sum(weights):
        raise ConfigError(
            "data.split", f"{split!r} is not one to three non-negative numbers separated by commas, as in 969,30,1"
        )
    total = sum(weights)
    return weights[0] / total, weights[1] / total, weights[2] / total


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
    return ConfigError(key, f"{first['input']!r} is not valid: {first['msg'][:1].lower()}{first['msg'][1:]}")


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
    keys = known_keys()
    section, _, name = key.rpartition(".")
    same_name = [known for known in keys if known.endswith(f".{name}")]
    near = same_name or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if not near and section not in TrainConfig.model_fields:
        return f"unknown key; the sections are {', '.join(TrainConfig.model_fields)}"
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return (
        f"unknown key; {section} has {', '.join(k.removeprefix(section + '.') for k in keys if k.startswith(section))}"
    )


def load_config(path: Path) -> TrainConfig:
    """TrainConfig from a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not a YAML mapping, or holds a value that cannot be used.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("", f"cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError("", f"is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError("", f"is not a mapping of the sections {', '.join(TrainConfig.model_fields)}")
    return build_config(values)
