"""The sections of TrainConfig. A field holds its own range; trainer.planning.checks the relations between keys."""

# Annotations are evaluated here on purpose: turned into strings, pydantic would compile each of them again at start-up.
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from trainer.config.data_checks import PATH_KEYS, BlendPart, parse_blend, path_entries
from trainer.config.kernel_names import BackendChoice
from trainer.config.tokenizer_keys import TokenizerKeys

MOST_OF_ANYTHING = 10**12
"""Largest whole number of a key without a limit of its own; more is a slip of the pen, and would be counted up to."""


def _current_name(name: Any) -> Any:
    return {"own": "native", "eager": "reference"}.get(name, name) if isinstance(name, str) else name


BackendKey = Annotated[BackendChoice, BeforeValidator(_current_name)]
"""A backend by name; ``own`` and ``eager``, the names in runs of 0.1.0, mean ``native`` and ``reference``."""


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, NaN, infinity and absurdly large whole numbers refused."""

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

    @field_validator("*", mode="after")
    @classmethod
    def _check_magnitude(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and value > MOST_OF_ANYTHING:
            limits = cls.model_fields[info.field_name or ""].metadata
            if not any(getattr(limit, "le", None) for limit in limits):
                raise ValueError(f"at most {MOST_OF_ANYTHING:,} makes sense here")
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

    num_layers: int = Field(gt=0, le=10_000)
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
    vocab_size: int | None = Field(None, gt=0, lt=2**31)
    """Unset: the tokenizer's, as the data's manifest states it. With NullTokenizer: how many numbers it takes; the
    model then knows one token more, which ends documents."""
    make_vocab_size_divisible_by: PositiveInt = 128
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """flash: the flash-attn package; fused: torch's own kernels; unfused or local: scores in memory."""
    num_experts: PositiveInt | None = None
    """Experts per mixture-of-experts layer. Unset: a dense model."""
    moe_layer_freq: PositiveInt = 1
    """Every how manieth layer has experts, counted from the first."""
    moe_ffn_hidden_size: PositiveInt | None = None
    """Feed-forward width of one expert. Unset: the dense one."""
    moe_router_topk: PositiveInt = 2
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice. Unset: over the chosen ones only."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    moe_router_load_balancing_type: Literal["aux_loss", "none"] = "aux_loss"
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    moe_z_loss_coeff: NonNegativeFloat | None = None
    moe_expert_capacity_factor: PositiveFloat | None = None
    """Tokens per expert in training, as a multiple of an even share. Unset: no token is ever dropped."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Width of an expert that every token passes through. Unset: none."""

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer, counted over the whole model, has experts."""
        return self.num_experts is not None and layer % self.moe_layer_freq == 0

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has a feed-forward part without experts."""
        # Where any layer has experts the first has; if the second has too, all have.
        return not all(self.is_moe_layer(layer) for layer in range(min(self.num_layers, 2)))

    @field_validator("moe_layer_freq", mode="before")
    @classmethod
    def _check_moe_layer_freq(cls, value: Any) -> Any:
        if isinstance(value, list) or (isinstance(value, str) and "[" in value):
            raise ValueError(
                "a list of layers is not available here; give one number N, by which every N-th layer has experts, "
                "counted from the first"
            )
        return value

    @property
    def expert_ffn_size(self) -> int:
        """Feed-forward width of one expert, with the default filled in."""
        return self.moe_ffn_hidden_size or self.ffn_size

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

        The added rows never take part in the loss (see trainer.model.tensor_parallel.cross_entropy), so that the loss
        does not depend on how far a layout makes us round.
        """
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-vocab_size // multiple) * multiple


class ParallelConfig(Section):
    """How the job's ranks are divided: world size = tp x pp x cp x dp; ep divides dp x cp."""

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    cp_comm_type: Literal["p2p", "a2a"] = "p2p"
    """p2p: ring attention; a2a: heads are divided instead of the sequence while attention runs (Ulysses)."""
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt | None = None
    """Unset: as tensor_model_parallel_size."""
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel regions along the sequence. Without effect when tp is 1."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] | None = None
    """Unset: interleaved where ranks hold several virtual stages, else 1f1b."""
    num_virtual_stages_per_pipeline_rank: PositiveInt | None = None
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = None
    """The same by the number of layers in each; excludes the former."""
    decoder_first_pipeline_num_layers: NonNegativeInt | None = None
    decoder_last_pipeline_num_layers: NonNegativeInt | None = None
    pipeline_model_parallel_layout: str | None = None
    """Which layers each virtual stage holds, as in ``Et*3|t*4|t*4|t*3L``. Unset: balanced by cost."""
    use_distributed_optimizer: bool = False
    """ZeRO-1: masters and moments divided over dp x cp. The same as data_parallel_sharding_strategy: optim."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = None
    """What is divided over dp x cp: nothing, ZeRO-1, ZeRO-2 or ZeRO-3."""
    overlap_grad_reduce: bool = True
    """Start reducing a gradient bucket as soon as backward has filled it. This and the next two are without effect
    under ZeRO-2 and 3, which sum and gather layer by layer, always while others are computed."""
    overlap_param_gather: bool = True
    """Gather the updated parts of the weights while the next forward runs, with ZeRO-1; else without effect."""
    ddp_bucket_size: PositiveInt | None = None
    """Elements per gradient bucket. Unset: max(40 million, 1 million x dp x cp), as in Megatron-LM, with gloo 1
    million; or all in one where nothing overlaps."""
    no_gradient_accumulation_fusion: bool = False
    """Let autograd make weight gradients, which are then added up, instead of adding up in the product that makes them.
    Fully sharded gradients (ZeRO-2 and -3) are never added up in that product."""
    distributed_timeout_minutes: float = Field(default=10.0, gt=0.0, le=525_600.0)
    """How long a rank waits for the others before it gives up; at most a year."""

    @property
    def zero_stage(self) -> int:
        """0 to 3: how much of the training state is divided over the ranks of dp x cp."""
        strategy = self.data_parallel_sharding_strategy or ("optim" if self.use_distributed_optimizer else "no_shard")
        return ("no_shard", "optim", "optim_grads", "optim_grads_params").index(strategy)


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
    seed: int = Field(1234, ge=0, le=2**63 - 1)
    eval_interval: PositiveInt = 1000
    eval_iters: NonNegativeInt = 100
    """Iterations of one evaluation; 0 evaluates never."""
    exit_interval: PositiveInt | None = None
    """Save and leave when the iteration is a multiple of this."""
    recompute_granularity: Literal["selective", "full"] | None = None
    """What is computed again in backward instead of kept: the modules of recompute_modules, or whole layers."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full: layers in groups of recompute_num_layers, or the first recompute_num_layers of each stage."""
    recompute_num_layers: PositiveInt | None = None
    recompute_modules: list[str] = []
    """With selective: names out of core_attn, mlp, layernorm, moe, moe_act. Unset: core_attn."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic_mode: bool = False
    kernel_backend: BackendKey = "auto"
    """What operations limited by memory run on: native (csrc, compiled here), nvrtc (the same, compiled by NVRTC),
    compile (torch.compile of reference; on CPUs by name only), torch, or reference (a chain of torch's operations).
    auto: the first of them that is there and passes its self-test; on GPUs that ``python -m trainer kernels bench`` has
    measured, in the order of trainer.ops.dispatch.tuning."""
    kernel_backends: dict[str, BackendKey] = {}
    """The same for single operations, as in ``rope: reference``; see trainer.planning.kernel_choice for their names."""
    no_masked_softmax_fusion: bool = False
    no_bias_gelu_fusion: bool = False
    """Which GeLU it is, openai_gelu alone says; in Megatron-LM the fused one is the tanh approximation."""
    no_bias_swiglu_fusion: bool = False
    no_bias_dropout_fusion: bool = False
    no_rope_fusion: bool = False
    cross_entropy_loss_fusion: bool = True
    moe_permute_fusion: bool = True


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
    optimizer_cpu_offload: bool = False
    """Keep masters and moments in CPU memory and step there, while gradients and weights travel."""
    optimizer_offload_fraction: float = Field(1.0, ge=0.0, le=1.0)


class DataConfig(TokenizerKeys, Section):
    """Where the tokens come from."""

    data_path: list[str] = []
    """Prefixes of Megatron .bin/.idx pairs, divided into train, valid and test by ``split``. Several are blended: with
    weights, ``0.3 A 0.7 B``, samples are drawn in these proportions; without, ``A B``, in proportion to their sizes."""
    train_data_path: list[str] = []
    """The same for training alone, undivided; in place of data_path."""
    valid_data_path: list[str] = []
    test_data_path: list[str] = []
    """Read by ``python -m trainer evaluate`` alone."""
    split: str = "969,30,1"
    """One to three shares: of train, valid and test."""
    sample_order: Literal["stable", "megatron"] = "stable"
    """stable: each epoch is shuffled by itself, the first as Megatron-LM would shuffle one, so that a longer run goes
    on as a shorter one did. megatron: the epochs of the run are shuffled together, in Megatron-LM's very order for the
    same seed, lengths, iterations and batch size; there another train_iters is another order."""
    sample_packing: bool = False
    """For fine-tuning: documents are never cut. As many whole ones as fit fill a sequence, each with attention and
    positions of its own; what is left over is padding outside the loss. Documents of more than seq_length + 1 tokens
    are left out. (Megatron-LM's --sft packs the conversations of one line so.)"""
    answer_only_loss: bool = False
    """With sample_packing: the sequences of a document are prompts and answers by turns, of which the last is an
    answer, and only tokens of answers count in the loss."""
    mock_data: bool = False
    """Train on a generated, learnable token stream, so that a cluster can be tried without any data."""
    eod_mask_loss: bool = False
    reset_attention_mask: bool = False
    """Attention ends with a document: tokens never attend to those of another one in the same sample."""
    reset_position_ids: bool = False
    """Positions begin anew with each document."""
    num_workers: NonNegativeInt = 2
    """0: each batch is read when it is needed. More: batches are read ahead in the background, and with ``streaming``
    so many processes of each replica encode text. No batch depends on it."""
    streaming: bool = False
    """Train straight from text: the data paths name files, patterns or folders of .jsonl, .parquet or plain text,
    compressed or not, which is encoded while the model trains. ``split`` divides documents by a hash of their text."""
    streaming_key: str = "text"
    """JSON key, or column of a table, that holds the text."""
    streaming_text_document: Literal["file", "paragraph", "line"] = "file"
    """What is a document in plain text."""
    streaming_on_error: Literal["stop", "skip"] = "stop"
    """At what is no document."""
    streaming_buffer_mib: PositiveInt = 16
    """Text whose documents are shuffled together. In memory it takes up to ten times as much."""
    data_cache_path: str | None = None
    """Folder for index caches. Unset: ``cache`` beside the data, or in the run directory when that is read-only."""

    @field_validator(*PATH_KEYS, mode="before")
    @classmethod
    def _split_into_entries(cls, value: Any) -> Any:
        return path_entries(value)

    def blend(self, key: str) -> tuple[BlendPart, ...]:
        """The datasets that a key named ``*data_path`` asks for; without those of weight 0."""
        return tuple(part for part in parse_blend(f"data.{key}", getattr(self, key)) if part.weight != 0)


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
