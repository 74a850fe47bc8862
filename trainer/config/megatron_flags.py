"""What becomes of each flag of a Megatron-LM command line here. Torch-free.

A flag is one of: a key of the training config (with dashes), an alias of one, accepted without effect and with the
reason, or refused with a sentence. Nothing is dropped silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Alias:
    """A flag that sets a key under another name.

    Attributes:
        key: dotted key of the training config.
        value: what a flag without a value sets; None takes the value that follows.
        yields: give way where the key is also set by its own name.
    """

    key: str
    value: Any = None
    yields: bool = False


@dataclass(frozen=True)
class WithoutEffect:
    """A flag that is accepted and changes nothing.

    Attributes:
        reason: why nothing need be done; a sentence for the log.
        values: how many values follow.
        only: the values for which the reason holds; with any other the flag is refused.
    """

    reason: str
    values: int = 0
    only: tuple[str, ...] = ()


ALIASES: dict[str, Alias] = {
    "rope-theta": Alias("model.rotary_base"),
    # Megatron's deprecated switch "no learned positions", given beside --position-embedding-type rope as a rule.
    "no-position-embedding": Alias("model.position_embedding_type", "none", yields=True),
    "use-rotary-position-embeddings": Alias("model.position_embedding_type", "rope"),
    "layernorm-epsilon": Alias("model.norm_epsilon"),
    "model-parallel-size": Alias("parallel.tensor_model_parallel_size"),
    "batch-size": Alias("training.micro_batch_size"),
    "warmup": Alias("optimizer.lr_warmup_fraction"),
    "no-overlap-grad-reduce": Alias("parallel.overlap_grad_reduce", False),
    "no-overlap-param-gather": Alias("parallel.overlap_param_gather", False),
    # Megatron-LM's older switch; scripts give it beside --recompute-granularity.
    "recompute-activations": Alias("training.recompute_granularity", "selective", yields=True),
    "activations-checkpoint-granularity": Alias("training.recompute_granularity"),
    "activations-checkpoint-method": Alias("training.recompute_method"),
    "activations-checkpoint-num-layers": Alias("training.recompute_num_layers"),
    "checkpoint-num-layers": Alias("training.recompute_num_layers"),
    "use-torch-fsdp2": Alias("parallel.data_parallel_sharding_strategy", "optim_grads_params", yields=True),
}

_FUSION = "kernels are chosen by what the device can do; the result is the same"
_CORE = "there is one implementation of the model here"
_FP8_DETAIL = "it only shapes fp8 training, which --fp8-format asks for"
_OVERLAP = "messages and computation overlap wherever the backend lets them"
_BALANCED = "stages are always balanced by cost, with embedding and loss counted"
_EXPERT_KERNELS = "kernels for experts are chosen by what the device can do; the result is the same"
_FP32_STATE = "main gradients, masters and moments are always float32"
_DISPATCHERS = ("alltoall", "alltoall_seq", "allgather", "flex")
_REPORTING = "metrics.jsonl and the log always carry it"
_WANDB = "metrics go to metrics.jsonl in the run directory; nothing is sent to Weights & Biases"

WITHOUT_EFFECT: dict[str, WithoutEffect] = {
    "distributed-backend": WithoutEffect(
        "follows from the device: nccl on GPUs, gloo on CPU", 1, only=("nccl", "gloo")
    ),
    "use-checkpoint-args": WithoutEffect("the config states the model's shape; a checkpoint of another one is refused"),
    "use-mcore-models": WithoutEffect(_CORE),
    "use-legacy-models": WithoutEffect(_CORE),
    "transformer-impl": WithoutEffect(_CORE, 1),
    "use-flash-attn": WithoutEffect(
        "--attention-backend chooses, by default the fastest kernels that are there and can do what the config asks for"
    ),
    "no-async-tensor-model-parallel-allreduce": WithoutEffect(_FUSION),
    "cross-entropy-fusion-impl": WithoutEffect(_FUSION, 1, only=("native", "te")),
    "no-persist-layer-norm": WithoutEffect("there is one LayerNorm here, which takes every width"),
    "attention-softmax-in-fp32": WithoutEffect("the softmax of attention always accumulates in fp32"),
    "accumulate-allreduce-grads-in-fp32": WithoutEffect("gradients are always accumulated and reduced in fp32"),
    "no-query-key-layer-scaling": WithoutEffect("scores are never scaled by the layer's number"),
    "distribute-saved-activations": WithoutEffect(
        "with --sequence-parallel what is kept for recompute is divided over tensor-parallel ranks anyway"
    ),
    "overlap-p2p-communication": WithoutEffect(_OVERLAP),
    "no-overlap-p2p-communication": WithoutEffect(_OVERLAP),
    "batch-p2p-communication": WithoutEffect("messages are batched where the schedule's table shows that it is safe"),
    "microbatch-group-size-per-virtual-pipeline-stage": WithoutEffect(
        "groups have as many micro-batches as the pipeline has ranks, and more where the last would have fewer", 1
    ),
    "tp-comm-overlap": WithoutEffect(_OVERLAP),
    "tp-comm-overlap-cfg": WithoutEffect(_OVERLAP, 1),
    "tp-comm-bulk-dgrad": WithoutEffect(_OVERLAP),
    "tp-comm-bulk-wgrad": WithoutEffect(_OVERLAP),
    "disable-tp-comm-overlap-ag": WithoutEffect(_OVERLAP),
    "disable-tp-comm-overlap-rs": WithoutEffect(_OVERLAP),
    "align-grad-reduce": WithoutEffect(_OVERLAP),
    "no-align-grad-reduce": WithoutEffect(_OVERLAP),
    "align-param-gather": WithoutEffect(_OVERLAP),
    "no-align-param-gather": WithoutEffect(_OVERLAP),
    "overlap-param-gather-with-optimizer-step": WithoutEffect(_OVERLAP),
    "overlap-cpu-optimizer-d2h-h2d": WithoutEffect(_OVERLAP),
    "use-torch-optimizer-for-cpu-offload": WithoutEffect("there is one optimizer for the CPU here"),
    "ddp-average-in-collective": WithoutEffect("gradients are summed, and divided once by the number of valid tokens"),
    "account-for-embedding-in-pipeline-split": WithoutEffect(_BALANCED),
    "account-for-loss-in-pipeline-split": WithoutEffect(_BALANCED),
    "use-megatron-fsdp": WithoutEffect("--data-parallel-sharding-strategy alone says what is divided"),
    "num-distributed-optimizer-instances": WithoutEffect("its state is divided once, over dp x cp", 1, only=("1",)),
    "grad-reduce-in-bf16": WithoutEffect(_FP32_STATE),
    "use-precision-aware-optimizer": WithoutEffect(_FP32_STATE),
    "main-grads-dtype": WithoutEffect(_FP32_STATE, 1, only=("fp32",)),
    "main-params-dtype": WithoutEffect(_FP32_STATE, 1, only=("fp32",)),
    "exp-avg-dtype": WithoutEffect(_FP32_STATE, 1, only=("fp32",)),
    "exp-avg-sq-dtype": WithoutEffect(_FP32_STATE, 1, only=("fp32",)),
    "moe-grouped-gemm": WithoutEffect(_EXPERT_KERNELS),
    "moe-use-legacy-grouped-gemm": WithoutEffect(_EXPERT_KERNELS),
    "moe-router-fusion": WithoutEffect(_EXPERT_KERNELS),
    "moe-shared-expert-overlap": WithoutEffect(_OVERLAP),
    "moe-token-dispatcher-type": WithoutEffect(
        "tokens always reach their experts by all-to-all; the result is the same", 1, only=_DISPATCHERS
    ),
    "moe-enable-deepep": WithoutEffect("tokens always reach their experts by torch's all-to-all"),
    "moe-pad-expert-input-to-capacity": WithoutEffect("padding changes no result, and none is needed here"),
    "moe-router-dtype": WithoutEffect("the router always computes in float32", 1, only=("fp32",)),
    "moe-per-layer-logging": WithoutEffect("the log carries the language model's loss alone"),
    "enable-cuda-graph": WithoutEffect(_FUSION),
    "te-rng-tracker": WithoutEffect(_CORE),
    "manual-gc": WithoutEffect("ranks wait for each other once per step, so that collections need not be aligned"),
    "manual-gc-interval": WithoutEffect("see --manual-gc", 1),
    "use-cpu-initialization": WithoutEffect("weights are always drawn on the CPU, so that every layout starts alike"),
    "fp8-amax-compute-algo": WithoutEffect(_FP8_DETAIL, 1),
    "fp8-amax-history-len": WithoutEffect(_FP8_DETAIL, 1),
    "fp8-margin": WithoutEffect(_FP8_DETAIL, 1),
    "fp8-interval": WithoutEffect(_FP8_DETAIL, 1),
    "use-gigatoken": WithoutEffect("the fastest library that is installed encodes; the tokens are the same"),
    "trust-remote-code": WithoutEffect("tokenizers are read from their files; no code beside them is run"),
    "tokenizer-hf-no-use-fast": WithoutEffect("the fastest library that is installed encodes; the tokens are the same"),
    "tokenizer-hf-use-fast": WithoutEffect("the fastest library that is installed encodes; the tokens are the same"),
    "legacy-tokenizer": WithoutEffect("there is one tokenizer of each kind here; the tokens are the same"),
    "tokenizer-hf-no-include-special-tokens": WithoutEffect(
        "text is only text unless --tokenizer-hf-include-special-tokens is given"
    ),
    "tokenizer-sentencepiece-legacy": WithoutEffect(
        "--tokenizer-special-tokens are added after the vocabulary; no text becomes one of them"
    ),
    "null-tokenizer-pad-id": WithoutEffect("no number stands for padding", 1),
    "data-impl": WithoutEffect("indexed datasets are always memory-mapped", 1, only=("mmap", "infer")),
    "dataloader-type": WithoutEffect("the data position is a sample count in one fixed order", 1, only=("single",)),
    "log-throughput": WithoutEffect(_REPORTING),
    "log-params-norm": WithoutEffect("the gradient's norm is logged; the parameters' is not"),
    "log-num-zeros-in-grad": WithoutEffect("the gradient's norm is logged; its zeros are not counted"),
    "log-timers-to-tensorboard": WithoutEffect(_REPORTING),
    "log-validation-ppl-to-tensorboard": WithoutEffect(_REPORTING),
    "timing-log-level": WithoutEffect(_REPORTING, 1),
    "tensorboard-dir": WithoutEffect(
        "metrics go to metrics.jsonl in the run directory; no TensorBoard file is written", 1
    ),
    "tensorboard-queue-size": WithoutEffect("no TensorBoard file is written", 1),
    "wandb-project": WithoutEffect(_WANDB, 1),
    "wandb-entity": WithoutEffect(_WANDB, 1),
    "wandb-name": WithoutEffect(_WANDB, 1),
    "wandb-exp-name": WithoutEffect(_WANDB, 1),
    "wandb-save-dir": WithoutEffect(_WANDB, 1),
    "ckpt-format": WithoutEffect("there is one checkpoint format here, which every layout can load", 1),
    "use-dist-ckpt": WithoutEffect("there is one checkpoint format here, which every layout can load"),
}

_TORCHRUN = "belongs to the launcher; give it to torchrun, before -m trainer"
_MTP = "multi-token prediction is not available here; leave it out"
_HYBRID = "models with state-space layers are not available here; transformers only"
_MLA = "multi-head latent attention is not available here; use --num-query-groups for smaller keys and values"
_OTHER_ROUTER = (
    "this way of routing is not available; there are --moe-router-score-function softmax and sigmoid, "
    "--moe-router-pre-softmax and --moe-router-topk-scaling-factor"
)
_OTHER_ROPE = "there is one form of rotary positions: two halves of a head, with --rotary-base and --rotary-percent"
_OFFLOAD = "activations are not moved to the CPU; use --recompute-granularity full, or --optimizer-cpu-offload"
_MASKED = (
    "models of masked text (BERT, T5) are not trained here; leave it out. What such a model would be given, python -m "
    "trainer masked-samples shows"
)
_SPACES = "the model's file says what becomes of rows of spaces; leave it out, or name a model that keeps them"
_SAMPLES = "training is counted in iterations here; give the same length with --train-iters or --lr-*-iters"

REFUSED: dict[str, str] = {
    "mtp-num-layers": _MTP,
    "mtp-loss-scaling-factor": _MTP,
    "is-hybrid-model": _HYBRID,
    "hybrid-layer-pattern": _HYBRID,
    "hybrid-override-pattern": _HYBRID,
    "hybrid-attention-ratio": _HYBRID,
    "hybrid-mlp-ratio": _HYBRID,
    "multi-latent-attention": _MLA,
    "q-lora-rank": _MLA,
    "kv-lora-rank": _MLA,
    "qk-head-dim": _MLA,
    "qk-pos-emb-head-dim": _MLA,
    "v-head-dim": _MLA,
    "moe-router-num-groups": _OTHER_ROUTER,
    "moe-router-group-topk": _OTHER_ROUTER,
    "moe-router-topk-limited-devices": _OTHER_ROUTER,
    "moe-router-enable-expert-bias": _OTHER_ROUTER,
    "moe-router-bias-update-rate": _OTHER_ROUTER,
    "moe-router-force-load-balancing": _OTHER_ROUTER,
    "moe-input-jitter-eps": _OTHER_ROUTER,
    "moe-apply-probs-on-input": _OTHER_ROUTER,
    "moe-shared-expert-gate": "the shared expert has no gate here; leave it out",
    "moe-layer-recompute": "give --recompute-granularity selective --recompute-modules moe instead",
    "moe-extended-tp": "experts are divided by --expert-model-parallel-size, and each over tensor-parallel ranks",
    "moe-use-upcycling": "a dense checkpoint does not become one with experts here; start from one that has them",
    "hierarchical-context-parallel-sizes": "context parallelism has one level; use --cp-comm-type p2p or a2a",
    "standalone-embedding-stage": "give --pipeline-model-parallel-layout with E alone in its first stage instead",
    "pipeline-model-parallel-split-rank": "models with an encoder are not available here; leave it out",
    "cpu-offloading": _OFFLOAD,
    "cpu-offloading-num-layers": _OFFLOAD,
    "checkpoint-activations": "give --recompute-granularity full --recompute-method uniform instead",
    "rotary-interleaved": _OTHER_ROPE,
    "use-rope-scaling": _OTHER_ROPE,
    "qk-l2-norm": "queries and keys are not normalised here; leave it out",
    "fp8-format": "fp8 training is not available; leave out the --fp8 flags and train with --bf16",
    "fp8-hybrid": "fp8 training is not available; leave out the --fp8 flags and train with --bf16",
    "fp8-e4m3": "fp8 training is not available; leave out the --fp8 flags and train with --bf16",
    "use-z-loss": "the z-loss over the vocabulary is not available, and without it the loss is another one; drop it to "
    "train without",
    "mask-prob": _MASKED,
    "short-seq-prob": _MASKED,
    "bert-no-binary-head": _MASKED,
    "encoder-seq-length": _MASKED,
    "decoder-seq-length": _MASKED,
    "train-samples": _SAMPLES,
    "lr-decay-samples": _SAMPLES,
    "lr-warmup-samples": _SAMPLES,
    "rampup-batch-size": "the global batch size is constant here; leave it out",
    "tokenizer-metadata": "the tokenizer's kind is told from its files, or by --tokenizer-type; leave it out",
    "padded-vocab-size": "give --vocab-size, which --make-vocab-size-divisible-by pads",
    "no-pad-vocab-size": "give --make-vocab-size-divisible-by 1",
    "disable-pad-vocab-size": "give --make-vocab-size-divisible-by 1",
    "tiktoken-special-tokens": "give the names as --tokenizer-special-tokens",
    "no-tokenizer-sentencepiece-ignore-extra-whitespaces": _SPACES,
    "disable-tokenizer-sentencepiece-ignore-extra-whitespaces": _SPACES,
    "chat-template": "chats are not tokenized here; leave it out",
    "null-tokenizer-eod-id": "a document always ends with the id after the last number; leave it out",
    "squared-relu": "the activations are GeLU, its tanh form (--openai-gelu) and SwiGLU (--swiglu); choose one of them",
    "qk-layernorm": "queries and keys are not normalised here; leave it out",
    "data-args-path": "give what the file says as --data-path",
    "per-split-data-args-path": "give what the file says as --train-data-path, --valid-data-path and --test-data-path",
    "sft": "tokenize the conversations into documents first, prompts and answers as sequences by turns, and give "
    "--sample-packing with --answer-only-loss",
    "pretrained-checkpoint": "give the folder as --load together with --finetune",
    "nproc_per_node": _TORCHRUN,
    "nproc-per-node": _TORCHRUN,
    "nnodes": _TORCHRUN,
    "node_rank": _TORCHRUN,
    "node-rank": _TORCHRUN,
    "master_addr": _TORCHRUN,
    "master-addr": _TORCHRUN,
    "master_port": _TORCHRUN,
    "master-port": _TORCHRUN,
    "local_rank": _TORCHRUN,
    "local-rank": _TORCHRUN,
    "use_env": _TORCHRUN,
    "use-env": _TORCHRUN,
}

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
"""Its three SentencePiece ones mean the same since it gave up adding tokens of its own."""

NOT_OF_TEXT = ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer")
"""Its others."""
NOT_OF_TEXT_SAID = "images and chats are not tokenized here; prepare text, and name the tokenizer below it"
