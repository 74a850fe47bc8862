"""What becomes of each flag of a Megatron-LM command line here. Torch-free.

A flag is one of: a key of the training config (with dashes), an alias of one, accepted without effect and with the
reason, or refused with a sentence. Nothing is dropped silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
        values: how many values follow; -1 is any number.
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
}

_FUSION = "kernels are chosen by what the device can do; the result is the same"
_CORE = "there is one implementation of the model here"
_FP8_DETAIL = "it only shapes fp8 training, which --fp8-format asks for"
_SELECTIVE = (
    "fused attention, which --attention-dropout 0 brings, recomputes its scores by itself, and no more would be"
)
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
    "use-flash-attn": WithoutEffect("fused attention is used wherever the device has it and --attention-dropout is 0"),
    "no-masked-softmax-fusion": WithoutEffect(_FUSION),
    # Megatron-LM's fused kernel is the tanh approximation, so that dropping it means the exact GeLU, which is ours.
    "no-bias-gelu-fusion": WithoutEffect("GeLU is the exact one unless --openai-gelu asks for the tanh approximation"),
    "no-bias-swiglu-fusion": WithoutEffect(_FUSION),
    "no-bias-dropout-fusion": WithoutEffect(_FUSION),
    "no-rope-fusion": WithoutEffect(_FUSION),
    "no-gradient-accumulation-fusion": WithoutEffect(_FUSION),
    "no-async-tensor-model-parallel-allreduce": WithoutEffect(_FUSION),
    "cross-entropy-loss-fusion": WithoutEffect(_FUSION),
    "attention-softmax-in-fp32": WithoutEffect("the softmax of attention always accumulates in fp32"),
    "accumulate-allreduce-grads-in-fp32": WithoutEffect("gradients are always accumulated and reduced in fp32"),
    "no-query-key-layer-scaling": WithoutEffect("scores are never scaled by the layer's number"),
    "recompute-activations": WithoutEffect(_SELECTIVE),
    "use-cpu-initialization": WithoutEffect("weights are always drawn on the CPU, so that every layout starts alike"),
    "fp8-amax-compute-algo": WithoutEffect(_FP8_DETAIL, 1),
    "fp8-amax-history-len": WithoutEffect(_FP8_DETAIL, 1),
    "fp8-margin": WithoutEffect(_FP8_DETAIL, 1),
    "fp8-interval": WithoutEffect(_FP8_DETAIL, 1),
    "data-impl": WithoutEffect("indexed datasets are always memory-mapped", 1, only=("mmap", "infer")),
    "num-workers": WithoutEffect("batches are cut from the memory-mapped dataset in the training process", 1),
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
_RECOMPUTE = (
    "activations cannot be recomputed by layers here; leave it out, and lower micro_batch_size if memory runs short"
)
_EXPERTS = "mixture-of-experts models cannot be trained here; leave it out for a dense model"
_SAMPLES = "training is counted in iterations here; give the same length with --train-iters or --lr-*-iters"
_VOCABULARY = "vocabulary files of this kind cannot be read; convert it to a tokenizer.json and give --tokenizer-model"

REFUSED: dict[str, str] = {
    "fp8-format": "fp8 training is not available; leave out the --fp8 flags and train with --bf16",
    "fp8-hybrid": "fp8 training is not available; leave out the --fp8 flags and train with --bf16",
    "fp8-e4m3": "fp8 training is not available; leave out the --fp8 flags and train with --bf16",
    "use-z-loss": "the z-loss is not available, and without it the loss is another one; drop it to train without",
    "train-samples": _SAMPLES,
    "lr-decay-samples": _SAMPLES,
    "lr-warmup-samples": _SAMPLES,
    "rampup-batch-size": "the global batch size is constant here; leave it out",
    "vocab-file": _VOCABULARY,
    "merge-file": _VOCABULARY,
    "squared-relu": "the activations are GeLU, its tanh form (--openai-gelu) and SwiGLU (--swiglu); choose one of them",
    "qk-layernorm": "queries and keys are not normalised here; leave it out",
    "test-data-path": "there is no test phase; give --train-data-path and --valid-data-path",
    "per-split-data-args-path": "give --train-data-path and --valid-data-path",
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
