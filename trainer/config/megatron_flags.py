"""Meaning of every Megatron-LM flag for this trainer. Torch-free.

A flag is either a key of the training config (with dashes), an alias of a key, accepted without effect for a stated
reason, or refused with a sentence. No flag is ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainer.config.forks.ignored import fork_ignored
from trainer.config.forks.refused import fork_refused
from trainer.config.ignored_flags import ignored_flags
from trainer.config.sections.profile_steps import FLAGS, STEPS
from trainer.config.unsupported_flags import unsupported_flags


@dataclass(frozen=True)
class Alias:
    """A flag that sets a key under another name.

    Attributes:
        key: dotted key of the training config.
        value: value that a flag without an argument sets; None takes the argument that follows.
        yields: the alias loses if the key is also set by its own name; of a mapping, the entries that are set there.
        entry: entry of a mapping that the flag sets; None sets the whole key.
        words: value of the key for each argument; None takes the argument itself.
        also: further keys that the flag sets, each to its own value.
    """

    key: str
    value: Any = None
    yields: bool = False
    entry: str | None = None
    words: Mapping[str, Any] | None = None
    also: tuple[Alias, ...] = ()


@dataclass(frozen=True)
class WithoutEffect:
    """A flag that is accepted and has no effect.

    Attributes:
        reason: sentence for the log that says why nothing need be done.
        values: number of arguments that follow; -1 for one or more.
        only: values for which the reason holds; the flag is refused with any other value.
        otherwise: what to do instead of another value.
    """

    reason: str
    values: int = 0
    only: tuple[str, ...] = ()
    otherwise: str = ""


# Megatron-LM, megatron/core/models/common/embeddings/rotary_pos_embedding.py, RotaryEmbedding._apply_scaling.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_FULL_RECOMPUTE = Alias(
    "training.recompute_granularity",
    "full",
    also=(
        Alias("training.recompute_method", "uniform", yields=True),
        Alias("training.recompute_num_layers", 1, yields=True),
    ),
)
_ZERO_STAGES = {"0": "no_shard", "1": "optim", "2": "optim_grads", "3": "optim_grads_params"}

ALIASES: dict[str, Alias] = {
    "rope-theta": Alias("model.rotary_base"),
    "use-rope-scaling": Alias("model.rope_scaling", _LLAMA3_ROPE, yields=True),
    "rope-scaling-factor": Alias("model.rope_scaling", entry="factor"),
    # Megatron-LM's deprecated switch for no learned positions; scripts usually give --position-embedding-type rope too.
    "non-persistent-save-interval": Alias("checkpoint.copy_interval"),
    "non-persistent-local-ckpt-dir": Alias("checkpoint.copy_folder"),
    "no-check-for-nan-in-loss-and-grad": Alias("training.max_skipped_steps", 0),
    "check-for-nan-in-loss-and-grad": Alias("training.max_skipped_steps", 1),
    "no-position-embedding": Alias("model.position_embedding_type", "none", yields=True),
    "use-rotary-position-embeddings": Alias("model.position_embedding_type", "rope"),
    "layernorm-epsilon": Alias("model.norm_epsilon"),
    "activation-func-clamp-value": Alias("model.activation_clamp"),
    "softmax-type": Alias("model.attention_sinks", words={"vanilla": False, "learnable": True}),
    "encoder-num-layers": Alias("model.num_layers"),
    "model-parallel-size": Alias("parallel.tensor_model_parallel_size"),
    "batch-size": Alias("training.micro_batch_size"),
    "warmup": Alias("optimizer.lr_warmup_fraction"),
    "bert-no-binary-head": Alias("model.bert_binary_head", False),
    "encoder-seq-length": Alias("training.seq_length"),
    "no-manual-gc-eval": Alias("training.manual_gc_eval", False),
    "disable-manual-gc-eval": Alias("training.manual_gc_eval", False),
    "no-overlap-grad-reduce": Alias("parallel.overlap_grad_reduce", False),
    "no-overlap-param-gather": Alias("parallel.overlap_param_gather", False),
    # Megatron-LM's older switch; scripts may give --recompute-granularity too.
    "recompute-activations": Alias("training.recompute_granularity", "selective", yields=True),
    "activations-checkpoint-granularity": Alias("training.recompute_granularity"),
    "activations-checkpoint-method": Alias("training.recompute_method"),
    "activations-checkpoint-num-layers": Alias("training.recompute_num_layers"),
    "checkpoint-num-layers": Alias("training.recompute_num_layers"),
    # Megatron-LM before 2022: every layer is recomputed, one at a time unless --checkpoint-num-layers says more.
    "checkpoint-activations": _FULL_RECOMPUTE,
    # llm-jp/Megatron-LM, branch tsubame, megatron/core/tensor_parallel/cross_entropy.py: a fixed coefficient.
    "use-z-loss": Alias("model.z_loss_coeff", 1e-4),
    # Megatron-DeepSpeed, megatron/arguments.py.
    "deepspeed-activation-checkpointing": _FULL_RECOMPUTE,
    "zero-stage": Alias("parallel.data_parallel_sharding_strategy", words=_ZERO_STAGES),
    "no-pipeline-parallel": Alias("parallel.pipeline_model_parallel_size", 1, yields=True),
    # DeepSpeed's sequence parallelism is Ulysses: ranks share the tokens, and the heads during attention.
    "ds-sequence-parallel-size": Alias(
        "parallel.context_parallel_size", also=(Alias("parallel.cp_comm_type", "a2a", yields=True),)
    ),
    "enable-zbh1-pipeline": Alias("parallel.pipeline_schedule", "zb-h1"),
    "init-method-xavier-uniform": Alias("model.init_method", "xavier_uniform"),
    "use-tp-pp-dp-mapping": Alias("parallel.rank_order", "tp-cp-ep-pp-dp"),
    "num-key-value-heads": Alias("model.num_query_groups"),
    "rotary-position-embeddings-theta": Alias("model.rotary_base"),
    "cpu-optimizer": Alias("optimizer.optimizer_cpu_offload", True),
    # bigscience's Megatron-DeepSpeed, megatron/model/glu_activations.py.
    "glu-activation": Alias(
        "model.activation_func",
        words={"geglu": "gelu", "reglu": "relu", "swiglu": "silu"},
        also=(Alias("model.gated_linear_unit", True),),
    ),
    # bigscience's Megatron-DeepSpeed: the rows of the table; see trainer/planning/command_line.py.
    "pad-vocab-size-to": Alias("model.vocab_size"),
    # bigscience's Megatron-DeepSpeed: a folder, or a name of the Hugging Face hub.
    "tokenizer-name-or-path": Alias("data.tokenizer_model"),
    "embed-layernorm": Alias("model.embedding_layer_norm", True),
    # swiss-ai's and llm-jp's Megatron-LM.
    "input-embeddings-multiplier": Alias("model.embedding_scale"),
    # bigscience's older name.
    "use-checkpoint-lr-scheduler": Alias("optimizer.use_checkpoint_opt_param_scheduler", True),
    "z-loss-strength": Alias("model.z_loss_coeff"),
    "log-memory-to-tensorboard": Alias("logging.log_memory", True),
    "log-device-memory-used": Alias("logging.log_memory", True),
    "log-batch-size-to-tensorboard": Alias("logging.log_batch_size", True),
    "log-world-size-to-tensorboard": Alias("logging.log_world_size", True),
    "no-barrier-with-level-1-timing": Alias("logging.barrier_with_level_1_timing", False),
    "wandb-exp-name": Alias("logging.wandb_name"),
    "wandb-tag": Alias("logging.wandb_tags"),
    # Of GENIAC's fork of Megatron-DeepSpeed; scripts give --wandb_project too.
    "use-wandb": Alias("logging.wandb_project", "llmctl", yields=True),
    # Together: see trainer/config/sections/profile_steps.py.
    **dict.fromkeys(FLAGS, Alias(STEPS)),
    "use-torch-fsdp2": Alias("parallel.data_parallel_sharding_strategy", "optim_grads_params", yields=True),
}

_FUSION = "kernels are selected for the device; the result is the same"
_CORE = "this trainer has a single implementation of the model"
_FP8 = "fp8 training is not supported; leave out the --fp8 flags and train with --bf16 (of a script: --arg fp8=bf16)"
_FP8_DETAIL = "the flag only matters for fp8 training, which --fp8-format requests"
_OVERLAP = "communication and computation overlap wherever the backend allows"
_BALANCED = "stages are always balanced by cost, including embedding and loss"
_EXPERT_KERNELS = "expert kernels are selected for the device; the result is the same"
_FP32_SUMS = "gradients are accumulated and reduced in fp32, unless --main-grads-dtype is bf16"
_FP32_STATE = "master weights are always float32"
_DISPATCHERS = ("alltoall", "alltoall_seq", "allgather", "flex")
_DEEPSPEED = "is a flag of Megatron-DeepSpeed; "
_OWN_LAYOUT = "use --pipeline-model-parallel-layout for another division of the layers than by cost"
_SHARED_RANKS = "encoder and decoder are on the same ranks"
_NO_ENCODER_RANKS = "encoder and decoder are on the same ranks; leave the flag out, and count its ranks as replicas"
_SCHEDULE = "the learning rate always follows the config, and the number of steps the checkpoint"

WITHOUT_EFFECT: dict[str, WithoutEffect] = {
    "distributed-backend": WithoutEffect(
        "follows from the device: nccl on GPUs, gloo on CPU", 1, only=("nccl", "gloo")
    ),
    "use-checkpoint-args": WithoutEffect(
        "what the config leaves out of the model's shape is always taken from --load, and another shape is refused"
    ),
    "use-mp-args-from-checkpoint-args": WithoutEffect(
        "every layout loads every checkpoint, and the config alone gives the layout; the result is the same"
    ),
    "use-mcore-models": WithoutEffect(_CORE),
    "use-legacy-models": WithoutEffect(_CORE),
    "transformer-impl": WithoutEffect(_CORE, 1),
    "use-flash-attn": WithoutEffect(
        "--attention-backend selects the kernels; the default is the fastest backend that supports the config"
    ),
    "no-async-tensor-model-parallel-allreduce": WithoutEffect(_FUSION),
    "no-persist-layer-norm": WithoutEffect("the LayerNorm kernel supports every width"),
    "attention-softmax-in-fp32": WithoutEffect("the softmax of attention always accumulates in fp32"),
    "accumulate-allreduce-grads-in-fp32": WithoutEffect(_FP32_SUMS),
    "no-query-key-layer-scaling": WithoutEffect("attention scores are never scaled by the layer number"),
    "apply-query-key-layer-scaling": WithoutEffect(
        "Megatron-LM divides scores by the layer number against an overflow of fp16 and multiplies them again in the "
        "softmax; here scores are kept in fp32, which needs no such detour"
    ),
    "distribute-saved-activations": WithoutEffect(
        "--sequence-parallel already shards the activations kept for recompute over tensor-parallel ranks"
    ),
    "overlap-p2p-communication": WithoutEffect(_OVERLAP),
    "no-overlap-p2p-communication": WithoutEffect(_OVERLAP),
    "batch-p2p-communication": WithoutEffect("messages are batched wherever the pipeline schedule allows"),
    "microbatch-group-size-per-virtual-pipeline-stage": WithoutEffect(
        "a group has one micro-batch per pipeline rank, or more if the last group would have fewer", 1
    ),
    "tp-comm-overlap": WithoutEffect(_OVERLAP),
    "tp-comm-overlap-cfg": WithoutEffect(_OVERLAP, 1),
    "align-grad-reduce": WithoutEffect(_OVERLAP),
    "no-align-grad-reduce": WithoutEffect(_OVERLAP),
    "align-param-gather": WithoutEffect(_OVERLAP),
    "no-align-param-gather": WithoutEffect(_OVERLAP),
    "overlap-param-gather-with-optimizer-step": WithoutEffect(_OVERLAP),
    "overlap-cpu-optimizer-d2h-h2d": WithoutEffect(_OVERLAP),
    "use-torch-optimizer-for-cpu-offload": WithoutEffect("this trainer has a single CPU optimizer"),
    "ddp-average-in-collective": WithoutEffect("gradients are summed and divided once by the number of valid tokens"),
    "account-for-embedding-in-pipeline-split": WithoutEffect(_BALANCED),
    "account-for-loss-in-pipeline-split": WithoutEffect(_BALANCED),
    "use-megatron-fsdp": WithoutEffect("--data-parallel-sharding-strategy alone selects the sharding"),
    "hierarchical-context-parallel-sizes": WithoutEffect(
        "all ranks of a context share one ring; the result is the same", -1
    ),
    "spec": WithoutEffect(_CORE, 1, only=("local",), otherwise="layers of your own are not supported; leave it out"),
    "grad-reduce-in-bf16": WithoutEffect(_FP32_SUMS),
    "use-precision-aware-optimizer": WithoutEffect(
        "--exp-avg-dtype, --store-param-remainders and their like alone set the storage"
    ),
    "main-params-dtype": WithoutEffect(_FP32_STATE, 1, only=("fp32",)),
    "moe-grouped-gemm": WithoutEffect(_EXPERT_KERNELS),
    "moe-use-legacy-grouped-gemm": WithoutEffect(_EXPERT_KERNELS),
    "moe-router-fusion": WithoutEffect(_EXPERT_KERNELS),
    "moe-shared-expert-overlap": WithoutEffect(_OVERLAP),
    "moe-token-dispatcher-type": WithoutEffect(
        "tokens are always dispatched by all-to-all; the result is the same", 1, only=_DISPATCHERS
    ),
    "moe-enable-deepep": WithoutEffect("tokens are always dispatched by PyTorch's all-to-all"),
    "moe-pad-expert-input-to-capacity": WithoutEffect(
        "padding would not change the result, and this trainer needs none"
    ),
    "moe-router-dtype": WithoutEffect("the router always computes in float32", 1, only=("fp32",)),
    "enable-cuda-graph": WithoutEffect(_FUSION),
    "te-rng-tracker": WithoutEffect(_CORE),
    "use-cpu-initialization": WithoutEffect(
        "weights are always initialized on the CPU, so that every parallel layout starts from the same weights"
    ),
    "fp8-amax-compute-algo": WithoutEffect(_FP8_DETAIL, 1),
    "fp8-amax-history-len": WithoutEffect(_FP8_DETAIL, 1),
    "fp8-margin": WithoutEffect(_FP8_DETAIL, 1),
    "fp8-interval": WithoutEffect(_FP8_DETAIL, 1),
    "use-gigatoken": WithoutEffect("the fastest installed library is used; the tokens are the same"),
    "trust-remote-code": WithoutEffect("tokenizers are read from their files; code in these folders is never run"),
    "tokenizer-hf-no-use-fast": WithoutEffect("the fastest installed library is used; the tokens are the same"),
    "tokenizer-hf-use-fast": WithoutEffect("the fastest installed library is used; the tokens are the same"),
    "legacy-tokenizer": WithoutEffect("each kind of tokenizer has a single implementation; the tokens are the same"),
    "tokenizer-hf-no-include-special-tokens": WithoutEffect(
        "this is the default; --tokenizer-hf-include-special-tokens switches special tokens on"
    ),
    "tokenizer-sentencepiece-legacy": WithoutEffect(
        "--tokenizer-special-tokens are appended to the vocabulary; text is never encoded as one of them"
    ),
    "null-tokenizer-pad-id": WithoutEffect("no token id means padding", 1),
    "data-impl": WithoutEffect("indexed datasets are always memory-mapped", 1, only=("mmap", "infer")),
    "dataloader-type": WithoutEffect("the data position is a sample count in one fixed order", 1, only=("single",)),
    "log-throughput": WithoutEffect("rows of metrics.jsonl always have tokens_per_s, tflops_per_device and mfu"),
    "log-timers-to-tensorboard": WithoutEffect(
        "rows of metrics.jsonl always have iteration_time_s, and with --timing-log-level the timers of the parts"
    ),
    "log-validation-ppl-to-tensorboard": WithoutEffect("rows of evaluations always have valid_ppl"),
    "use-mpi": WithoutEffect("ranks are found under mpirun as under every other launcher"),
    "use-gcp-dynamic-checkpointing": WithoutEffect("a job that is about to be ended saves a checkpoint by itself"),
    "use-flash-attn-v2": WithoutEffect(
        "--attention-backend selects the kernels; the default is the fastest backend that supports the config"
    ),
    "deepspeed": WithoutEffect(_DEEPSPEED + "this trainer has its own ZeRO, which --zero-stage selects"),
    "log-optimizer-states-to-tensorboard": WithoutEffect(
        _DEEPSPEED + "of the optimizer's state only the norm of the gradient is logged"
    ),
    "pp-partition-method": WithoutEffect(
        _BALANCED, 1, ("type:transformer|embedding", "type:transformer", "parameters"), _OWN_LAYOUT
    ),
    "DDP-impl": WithoutEffect(
        "gradients are reduced in buckets of this trainer's own",
        1,
        ("local", "torch"),
        "use --data-parallel-sharding-strategy optim_grads_params for a fully sharded training",
    ),
    "encoder-pipeline-model-parallel-size": WithoutEffect(_SHARED_RANKS, 1, ("0",), _NO_ENCODER_RANKS),
    "encoder-tensor-model-parallel-size": WithoutEffect(_SHARED_RANKS, 1, ("0",), _NO_ENCODER_RANKS),
    "override-opt-param-scheduler": WithoutEffect(_SCHEDULE),
    "override-lr-scheduler": WithoutEffect(_SCHEDULE),
    "head-lr-mult": WithoutEffect(
        "Megatron-LM multiplies with it only the rate of a head for image classes, and the models here have none", 1
    ),
    "rerun-mode": WithoutEffect(
        "training.replay_skipped_steps computes a step that is not finite again; no other step is repeated",
        1,
        ("disabled", "validate_results"),
        "results of repeated steps are not compared; leave the flag out",
    ),
    "ckpt-format": WithoutEffect("there is a single checkpoint format, which every parallel layout can load", 1),
    **{name: WithoutEffect(*meaning) for name, meaning in (ignored_flags() | fork_ignored()).items()},
}

_TORCHRUN = "is a flag of the launcher; give it to torchrun, before -m trainer"
_HYBRID = "models with state-space layers are not supported; only transformers are"
_OTHER_ROUTER = (
    "this way of routing is not supported; use --moe-router-score-function softmax or sigmoid, "
    "--moe-router-pre-softmax, --moe-router-num-groups and --moe-router-topk-scaling-factor"
)
_OFFLOAD = "activation offloading is not supported; use --recompute-granularity full, or --optimizer-cpu-offload"
_SPACES = "the SentencePiece model decides about repeated spaces; leave the flag out, or use a model that keeps them"

REFUSED: dict[str, str] = {
    "is-hybrid-model": _HYBRID,
    "hybrid-layer-pattern": _HYBRID,
    "hybrid-override-pattern": _HYBRID,
    "hybrid-attention-ratio": _HYBRID,
    "hybrid-mlp-ratio": _HYBRID,
    "moe-router-topk-limited-devices": _OTHER_ROUTER,
    "moe-router-force-load-balancing": _OTHER_ROUTER,
    "moe-input-jitter-eps": _OTHER_ROUTER,
    "moe-apply-probs-on-input": _OTHER_ROUTER,
    "moe-layer-recompute": "use --recompute-granularity selective --recompute-modules moe instead",
    "moe-extended-tp": "use --expert-model-parallel-size; each expert is also sharded over the tensor-parallel ranks",
    "moe-use-upcycling": "a dense checkpoint cannot be given experts; start from a checkpoint that has experts",
    "standalone-embedding-stage": "use --pipeline-model-parallel-layout with only E in the first stage instead",
    "pipeline-model-parallel-split-rank": "encoder and decoder are on the same ranks; leave the flag out",
    "cpu-offloading": _OFFLOAD,
    "cpu-offloading-num-layers": _OFFLOAD,
    "qk-l2-norm": "a norm of queries and keys without weights is not supported; use --qk-layernorm",
    "fp8-format": _FP8,
    "fp8-hybrid": _FP8,
    "fp8-e4m3": _FP8,
    "deepspeed-config": "the file is not read; give its meaning by flags: --zero-stage, --bf16 or --fp16, --clip-grad, "
    "--optimizer-cpu-offload",
    "data-parallel-random-init": "replicas must start from the same weights; leave the flag out",
    "tokenizer-metadata": "the kind of the tokenizer follows from its files or --tokenizer-type; leave the flag out",
    "padded-vocab-size": "use --vocab-size, which is padded to a multiple of --make-vocab-size-divisible-by",
    "no-pad-vocab-size": "use --make-vocab-size-divisible-by 1 instead",
    "disable-pad-vocab-size": "use --make-vocab-size-divisible-by 1 instead",
    "tiktoken-special-tokens": "use --tokenizer-special-tokens instead",
    "no-tokenizer-sentencepiece-ignore-extra-whitespaces": _SPACES,
    "disable-tokenizer-sentencepiece-ignore-extra-whitespaces": _SPACES,
    "chat-template": "chat templates are not supported; leave the flag out",
    "null-tokenizer-eod-id": "the end-of-document id is always --vocab-size; leave the flag out",
    "apply-residual-connection-post-layernorm": "the residual is the input of the norm; use --norm-placement post for "
    "norms after the residual add",
    "data-args-path": "pass the file's contents to --data-path",
    "per-split-data-args-path": "pass the file's contents to --train-data-path, --valid-data-path and --test-data-path",
    "sft": "tokenize each conversation into a document of alternating prompt and answer sequences, and use "
    "--sample-packing with --answer-only-loss",
    "pretrained-checkpoint": "use --load with the folder, together with --finetune",
    "nproc-per-node": _TORCHRUN,
    "nnodes": _TORCHRUN,
    "node-rank": _TORCHRUN,
    "master-addr": _TORCHRUN,
    "master-port": _TORCHRUN,
    "local-rank": _TORCHRUN,
    "use-env": _TORCHRUN,
    **unsupported_flags(),
    **fork_refused(),
}

SQUARE_ROOTS = {"use-embedding-scaling": ("model.embedding_scale", "model.hidden_size")}
"""Flag without an argument -> the key that it sets to the square root of another key (llm-jp's Megatron-LM)."""

ONE_OF_SEVERAL = {
    "moe-router-load-balancing-type": "a router has one way to balance; give one type",
    "moe-aux-loss-coeff": "a router has one loss that balances; give one coefficient",
    "num-experts": "all layers with experts have equally many; give one number",
}
"""Flag that takes several values in Megatron-LM or Megatron-DeepSpeed, and here only equal ones -> the reason."""

SPELLINGS: dict[str, Mapping[str, str | None]] = {
    # Megatron-LM takes 0 for unset.
    **dict.fromkeys(("exit-interval", "exit-duration-in-mins", "save-interval", "num-experts"), {"0": None}),
    # Transformer Engine's two levels of one exchange; the result is the same.
    "cp-comm-type": {"a2a+p2p": "p2p", "all_gather": "p2p"},
    "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    "tokenizer-type": {"PretrainedFromHF": "HuggingFaceTokenizer", "HFTokenizer": "HuggingFaceTokenizer"},
    "position-embedding-type": {"absolute": "learned_absolute", "rotary": "rope"},
}
"""Flag -> values as forks spell them, and the key's own value; None for unset."""

TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "NullTokenizer",
]
"""Megatron-LM's text tokenizers. Its three SentencePiece types are now equal: none adds further tokens."""

NOT_OF_TEXT = ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer")
"""Megatron-LM's tokenizers of images and chats, which are refused."""
NOT_OF_TEXT_MESSAGE = "tokenizers of images and chats are not supported; prepare text, and name the text tokenizer"
