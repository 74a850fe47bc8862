"""Sections of TrainConfig. A field checks its own range; trainer.planning.checks checks relations between keys."""

# No "from __future__ import annotations" here: pydantic would compile every annotation string again at start-up.
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
"""Largest integer of a key without a limit of its own. A larger one is a typo, and some loop would count up to it."""


def _current_name(name: Any) -> Any:
    return {"own": "native", "eager": "reference"}.get(name, name) if isinstance(name, str) else name


BackendKey = Annotated[BackendChoice, BeforeValidator(_current_name)]
"""Name of a backend. ``own`` and ``eager``, the names in release 0.1.0, mean ``native`` and ``reference``."""


class Section(BaseModel):
    """Base of all sections: frozen; refuses unknown keys, NaN, infinity and absurdly large integers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, str) and annotation == list[str]:
            return [value]
        # True equals 1 in Python, so that pydantic would accept YAML's true as the number 1.
        if isinstance(value, bool) and annotation is not bool and not isinstance(annotation, type(Section)):
            raise ValueError("needs a number or a name, not true or false")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _check_magnitude(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and value > MOST_OF_ANYTHING:
            limits = cls.model_fields[info.field_name or ""].metadata
            if not any(getattr(limit, "le", None) for limit in limits):
                raise ValueError(f"the largest accepted value is {MOST_OF_ANYTHING:,}")
        return value


class JobConfig(Section):
    """Resources that ``llmctl submit`` requests from the cluster.

    The trainer itself reads none of these keys.
    """

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
    """Unset: 4 x hidden_size; with swiglu 8/3 x hidden_size, rounded down to a multiple of 64, as in Megatron-LM."""
    kv_channels: PositiveInt | None = None
    """Width of one attention head. Unset: hidden_size / num_attention_heads."""
    group_query_attention: bool = False
    num_query_groups: PositiveInt | None = None
    """Number of key/value heads. Setting this key switches group_query_attention on."""
    max_position_embeddings: PositiveInt | None = None
    """Unset: training.seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    rotary_base: PositiveFloat = 10000.0
    rotary_percent: float = Field(1.0, gt=0.0, le=1.0)
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: PositiveFloat = 1e-5
    swiglu: bool = False
    openai_gelu: bool = False
    """Use the tanh approximation of GeLU, as the published GPT-2 weights do (gelu_new). Off: the exact GeLU."""
    disable_bias_linear: bool = False
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    attention_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    hidden_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    init_method_std: PositiveFloat = 0.02
    vocab_size: int | None = Field(None, gt=0, lt=2**31)
    """Unset: the tokenizer's vocabulary size from the data's manifest. With NullTokenizer: the number of token ids; the
    model then has one more token, which ends documents."""
    make_vocab_size_divisible_by: PositiveInt = 128
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """flash: the flash-attn package; fused: PyTorch's kernels; unfused or local: plain attention with the scores in
    memory; auto: the fastest backend that is available and supports the config."""
    num_experts: PositiveInt | None = None
    """Experts per mixture-of-experts layer. Unset: a dense model."""
    moe_layer_freq: PositiveInt = 1
    """Put experts in every N-th layer, starting with layer 0."""
    moe_ffn_hidden_size: PositiveInt | None = None
    """Feed-forward width of one expert. Unset: ffn_hidden_size."""
    moe_router_topk: PositiveInt = 2
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts, before the top-k selection. Off: over the selected experts only."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    moe_router_load_balancing_type: Literal["aux_loss", "none"] = "aux_loss"
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    moe_z_loss_coeff: NonNegativeFloat | None = None
    moe_expert_capacity_factor: PositiveFloat | None = None
    """Largest number of tokens per expert in training, as a multiple of an even share. Unset: no token is dropped."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Feed-forward width of the shared expert, which processes every token. Unset: no shared expert."""

    def is_moe_layer(self, layer: int) -> bool:
        """True if layer number ``layer`` of the whole model has experts."""
        return self.num_experts is not None and layer % self.moe_layer_freq == 0

    @property
    def has_dense_layers(self) -> bool:
        """True if some layer has a dense feed-forward network."""
        # If any layer has experts, layer 0 has; if layer 1 has too, all have.
        return not all(self.is_moe_layer(layer) for layer in range(min(self.num_layers, 2)))

    @field_validator("moe_layer_freq", mode="before")
    @classmethod
    def _check_moe_layer_freq(cls, value: Any) -> Any:
        if isinstance(value, list) or (isinstance(value, str) and "[" in value):
            raise ValueError(
                "a list of layers is not supported; give one number N, which puts experts in every N-th layer, "
                "starting with layer 0"
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
        """Rows of the embedding table: ``vocab_size`` padded for ``tp`` ranks.

        The padding rows never take part in the loss (see trainer.model.tensor_parallel.cross_entropy), so that the
        loss does not depend on the parallel layout.
        """
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-vocab_size // multiple) * multiple


class ParallelConfig(Section):
    """Parallel layout: world size = tp x pp x cp x dp; ep divides dp x cp."""

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    cp_comm_type: Literal["p2p", "a2a"] = "p2p"
    """p2p: ring attention; a2a: all-to-all, which shards heads instead of the sequence during attention (Ulysses)."""
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt | None = None
    """Must equal tensor_model_parallel_size, which is also the default."""
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel regions along the sequence. No effect when tp is 1."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] | None = None
    """Unset: interleaved if pipeline ranks hold several virtual stages, else 1f1b."""
    num_virtual_stages_per_pipeline_rank: PositiveInt | None = None
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = None
    """Layers per virtual stage. Cannot be combined with num_virtual_stages_per_pipeline_rank."""
    decoder_first_pipeline_num_layers: NonNegativeInt | None = None
    decoder_last_pipeline_num_layers: NonNegativeInt | None = None
    pipeline_model_parallel_layout: str | None = None
    """Layers of each virtual stage in Megatron-LM's notation, as in ``Et*3|t*4|t*4|t*3L``. Unset: balanced by cost."""
    use_distributed_optimizer: bool = False
    """ZeRO-1: shard master weights and moments over dp x cp. The same as data_parallel_sharding_strategy: optim."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = None
    """Training state sharded over dp x cp. no_shard: nothing; optim: ZeRO-1; optim_grads: ZeRO-2; optim_grads_params:
    ZeRO-3."""
    overlap_grad_reduce: bool = True
    """Start reducing a gradient bucket as soon as backward has filled it. No effect with ZeRO-2 and ZeRO-3, which
    always reduce and gather layer by layer while other layers are computed."""
    overlap_param_gather: bool = True
    """With ZeRO-1: gather the updated weights while the next forward runs. No effect otherwise."""
    ddp_bucket_size: PositiveInt | None = None
    """Elements per gradient bucket. Unset: max(40 million, 1 million x dp x cp), as in Megatron-LM; with gloo 1
    million; a single bucket if nothing overlaps. No effect with ZeRO-2 and ZeRO-3."""
    no_gradient_accumulation_fusion: bool = False
    """Let autograd compute weight gradients and add them to the main gradients afterwards, instead of accumulating
    inside the matrix product. ZeRO-2 and ZeRO-3 never accumulate inside the product."""
    distributed_timeout_minutes: float = Field(default=10.0, gt=0.0, le=525_600.0)
    """Timeout of collectives in minutes, after which a rank fails; at most a year."""

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        strategy = self.data_parallel_sharding_strategy or ("optim" if self.use_distributed_optimizer else "no_shard")
        return ("no_shard", "optim", "optim_grads", "optim_grads_params").index(strategy)


class TrainingConfig(Section):
    """Batch sizes, training length, precision, recompute, evaluation and op backends."""

    train_iters: NonNegativeInt
    seq_length: PositiveInt
    micro_batch_size: PositiveInt = 1
    global_batch_size: PositiveInt | None = None
    """Samples per iteration. Unset: micro_batch_size x dp, which fits any number of nodes."""
    bf16: bool = False
    fp16: bool = False
    loss_scale: PositiveFloat | None = None
    """Constant fp16 loss scale. Unset: dynamic loss scaling."""
    initial_loss_scale: PositiveFloat = 2.0**32
    min_loss_scale: PositiveFloat = 1.0
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    seed: int = Field(1234, ge=0, le=2**63 - 1)
    eval_interval: PositiveInt = 1000
    eval_iters: NonNegativeInt = 100
    """Iterations per evaluation; 0 disables evaluation."""
    exit_interval: PositiveInt | None = None
    """Save a checkpoint and exit when the iteration is a multiple of this number."""
    recompute_granularity: Literal["selective", "full"] | None = None
    """Activations to recompute in backward. selective: the modules in recompute_modules; full: whole layers."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full. uniform: all layers, in groups of recompute_num_layers; block: the first recompute_num_layers layers
    of each virtual stage."""
    recompute_num_layers: PositiveInt | None = None
    recompute_modules: list[str] = []
    """With selective: any of core_attn, mlp, layernorm, moe, moe_act. Unset: core_attn."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic_mode: bool = False
    kernel_backend: BackendKey = "auto"
    """Backend of the memory-bound ops: native (csrc, compiled by nvcc or a C++ compiler), nvrtc (csrc, compiled by
    NVRTC), compile (torch.compile of reference; on CPUs only if named), torch, or reference (plain PyTorch). auto: the
    first available backend that passes its self-test, in this order, or in the order of trainer.ops.dispatch.tuning on
    GPUs that ``python -m trainer kernels bench`` has measured."""
    kernel_backends: dict[str, BackendKey] = {}
    """Backend per op, as in ``rope: reference``. trainer.planning.kernel_choice lists the ops."""
    no_masked_softmax_fusion: bool = False
    no_bias_gelu_fusion: bool = False
    """Affects speed only: openai_gelu alone selects the GeLU. (Megatron-LM's fused GeLU is the tanh approximation.)"""
    no_bias_swiglu_fusion: bool = False
    no_bias_dropout_fusion: bool = False
    no_rope_fusion: bool = False
    cross_entropy_loss_fusion: bool = True
    moe_permute_fusion: bool = True


class OptimizerConfig(Section):
    """Optimizer, learning-rate schedule and gradient clipping."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: PositiveFloat
    min_lr: NonNegativeFloat = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    lr_decay_iters: PositiveInt | None = None
    """Unset: training.train_iters."""
    lr_warmup_iters: NonNegativeInt = 0
    lr_warmup_fraction: float | None = Field(None, ge=0.0, le=1.0)
    """Warmup as a fraction of lr_decay_iters. Cannot be combined with lr_warmup_iters."""
    lr_warmup_init: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.01
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    adam_eps: PositiveFloat = 1e-8
    sgd_momentum: float = Field(0.9, ge=0.0, lt=1.0)
    clip_grad: NonNegativeFloat = 1.0
    """Largest L2 norm of the whole model's gradient; 0 disables clipping."""
    optimizer_cpu_offload: bool = False
    """Keep master weights and moments in CPU memory and run the optimizer there. Each step moves gradients to the CPU
    and weights back."""
    optimizer_offload_fraction: float = Field(1.0, ge=0.0, le=1.0)


class DataConfig(TokenizerKeys, Section):
    """Training data, tokenizer and data loading."""

    data_path: list[str] = []
    """Prefixes of indexed datasets (.bin/.idx), divided into train, valid and test by ``split``. Several datasets are
    blended: with weights, ``0.3 A 0.7 B``, in these proportions; without, ``A B``, in proportion to their sizes."""
    train_data_path: list[str] = []
    """Datasets for training only, not divided by ``split``. Replaces data_path."""
    valid_data_path: list[str] = []
    test_data_path: list[str] = []
    """Used only by ``python -m trainer evaluate``."""
    split: str = "969,30,1"
    """One to three shares, for train, valid and test."""
    sample_order: Literal["stable", "megatron"] = "stable"
    """stable: shuffle each epoch separately, so that the order does not depend on train_iters; the first epoch has the
    order of a one-epoch run of Megatron-LM. megatron: shuffle all epochs of the run together, which gives exactly
    Megatron-LM's order for the same seed, lengths, iterations and batch size, and another order for another
    train_iters."""
    sample_packing: bool = False
    """For fine-tuning: pack whole documents into each sequence, with separate attention and positions per document.
    The rest of a sequence is padding, which does not count in the loss. Documents of more than seq_length + 1 tokens
    are skipped. (Megatron-LM's --sft packs the conversations of one line in this way.)"""
    answer_only_loss: bool = False
    """With sample_packing: the sequences of a document alternate between prompt and answer, ending with an answer, and
    only the tokens of answers count in the loss."""
    mock_data: bool = False
    """Train on a generated, learnable token stream, to test a cluster without data."""
    eod_mask_loss: bool = False
    reset_attention_mask: bool = False
    """Stop attention at document boundaries: a token never attends to another document in the same sample."""
    reset_position_ids: bool = False
    """Restart position ids at each document."""
    num_workers: NonNegativeInt = 2
    """0: read each batch on demand. Otherwise: prefetch batches in the background; with ``streaming`` this is the
    number of encoding processes per replica. The batches do not depend on this number."""
    streaming: bool = False
    """Train directly from text: the data paths name files, patterns or folders of .jsonl, .parquet or plain text,
    compressed or not, which is tokenized during training. ``split`` divides documents by a hash of their text."""
    streaming_key: str = "text"
    """JSON key or table column that holds the text."""
    streaming_text_document: Literal["file", "paragraph", "line"] = "file"
    """Unit of plain text that is one document."""
    streaming_on_error: Literal["stop", "skip"] = "stop"
    """Action at an invalid document."""
    streaming_buffer_mib: PositiveInt = 16
    """Size of the shuffle buffer in MiB of text; its memory can be ten times as large."""
    data_cache_path: str | None = None
    """Folder for index caches. Unset: ``cache`` beside the data, or in the run directory if the former is read-only."""

    @field_validator(*PATH_KEYS, mode="before")
    @classmethod
    def _split_into_entries(cls, value: Any) -> Any:
        return path_entries(value)

    def blend(self, key: str) -> tuple[BlendPart, ...]:
        """Datasets that the key ``key`` (``*data_path``) names, without those of weight 0."""
        return tuple(part for part in parse_blend(f"data.{key}", getattr(self, key)) if part.weight != 0)


class CheckpointConfig(Section):
    """Saving and loading of checkpoints."""

    save: str | None = None
    """Folder for checkpoints. Unset: ``checkpoints`` in the run directory; without a run directory nothing is saved."""
    load: str | None = None
    """Folder of the checkpoint to start from: the latest one in it. Ignored if ``save`` already holds a checkpoint of
    this run."""
    save_interval: PositiveInt | None = None
    """Iterations between checkpoints. Unset: save only at the end."""
    keep_last: PositiveInt | None = None
    """Delete all but the newest N checkpoints. Unset: keep all."""
    finetune: bool = False
    """Load only the weights from ``load``; iteration, optimizer, data position and RNG state start afresh."""
    no_load_optim: bool = False
    no_load_rng: bool = False
    no_save_optim: bool = False


class LoggingConfig(Section):
    """Logging and metrics."""

    log_interval: PositiveInt = 1
    peak_tflops: PositiveFloat | None = None
    """Peak speed of one device in TFLOP/s, for MFU. Unset: looked up for the GPU; unknown GPUs report no MFU."""
