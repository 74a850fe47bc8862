"""Flags of forks and older releases of Megatron-LM that have no effect. Torch-free.

Names: megatron/arguments.py of microsoft/Megatron-DeepSpeed@f4157bea, argonne-lcf/Megatron-DeepSpeed@ffa3456d and
bigscience-workshop/Megatron-DeepSpeed@8387ae17; megatron/training/arguments.py of llm-jp/Megatron-LM,
swiss-ai/Megatron-LM and NVIDIA's releases since 2023.
"""

from __future__ import annotations

IGNORED: tuple[tuple[str, str], ...] = (
    (
        "is a flag of Megatron-DeepSpeed, which declares it and never reads it",
        """
        no-load-lr-state
        """,
    ),
    (
        "is a flag of DeepSpeed's memory and buckets, of which this trainer has its own; the result is the same",
        """
        checkpoint-in-cpu contigious-checkpointing memory-centric-tiled-linear partition-activations profile-backward
        remote-device=1 split-transformers synchronize-each-layer tile-factor=1 use-pin-memory
        zero-allgather-bucket-size=1 zero-contigious-gradients zero-reduce-bucket-size=1 zero-reduce-scatter
        distribute-checkpointed-activations use-mics
        """,
    ),
    (
        "this trainer has a single implementation of Adam for each device; the result is the same",
        """
        cpu-torch-adam ds-fused-adam
        """,
    ),
    (
        "communication and computation overlap wherever the backend allows",
        """
        delay-param-gather no-contiguous-buffers-in-local-ddp no-delay-grad-reduce
        no-scatter-gather-tensors-in-pipeline use-contiguous-buffers-in-ddp
        """,
    ),
    (
        "kernels are selected for the device; the result is the same",
        """
        abort-on-unmet-fused-kernel-constraints bias-dropout-fusion bias-gelu-fusion disable-mem-efficient-ln
        qknorm-impl=1 use-flash-attn-builder use-flash-attn-triton use-flash-attn-v1
        """,
    ),
    (
        "--data-parallel-sharding-strategy alone selects the sharding",
        """
        use-custom-fsdp
        """,
    ),
    (
        "replicas of a weight are equal on all tensor-parallel ranks, and need no forced synchronization",
        """
        sync-tp-duplicated-parameters
        """,
    ),
    (
        "a lookup gives the same numbers in float32, and gradients are always accumulated in float32",
        """
        embedding-weights-in-fp32
        """,
    ),
    (
        "indexed datasets are always memory-mapped, and the loader's work does not change the samples",
        """
        mmap-warmup multiprocessing-context=1 s3-cache-path=1 valid-num-workers=1
        """,
    ),
    (
        "the profile is in the folder of the run's attempt",
        """
        trace-dir=1
        """,
    ),
    (
        "nothing is sent to One Logger or CodeCarbon",
        """
        codecarbon-dir=1 enable-one-logger one-logger-entity=1
        """,
    ),
    (
        "messages of the trainer have a single level, and the log of each rank has all of them",
        """
        log-level=1 log-level-replica=1
        """,
    ),
    (
        "the run directory always has the config of the run",
        """
        log-path=1
        """,
    ),
    (
        "rows of metrics.jsonl always have learning_rate",
        """
        no-log-learnig-rate-to-tensorboard
        """,
    ),
    (
        "the run directory names the run for the tracker, and a resumed run goes on in the same one",
        """
        wandb-id=1
        """,
    ),
    (
        "every checkpoint of this trainer is loaded in every layout; DeepSpeed's own checkpoints are not read",
        "universal-checkpoint",
    ),
    (
        "every pipeline schedule gives the gradients of the whole batch",
        "enable-zbh1-exact-semantics",
    ),
    (
        "no file is watched for the end of a run; llmctl cancel saves a checkpoint and ends it",
        """
        kill-switch-file=1 kill-switch-path=1 trigger-path=1
        """,
    ),
    (
        "a job that is about to be ended saves a checkpoint by itself",
        """
        dynamic-checkpointing-min=1
        """,
    ),
    (
        "sizes of models with a retriever, which are not trained here",
        """
        retro-attention-gate=1 retro-encoder-attention-dropout=1 retro-encoder-hidden-dropout=1
        retro-encoder-layers=1 retro-no-verify-neighbor-count retro-num-neighbors=1 retro-num-retrieved-chunks=1
        retriever-seq-length=1
        """,
    ),
)
"""Reason and flags: with ``=1`` a flag takes a value."""

_EXPERTS = """
    create-moe-param-group disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling
    enable-expert-tensor-parallelism expert-interval=1 mlp-type=1 moe-eval-capacity-factor=1 moe-expert-parallel-size=1
    moe-loss-coeff=1 moe-min-capacity=1 moe-train-capacity-factor=1 topk=1 use-tutel
"""
DENSE = "is about experts of Megatron-DeepSpeed, where --num-experts 1, its default, means none"
"""Reason of the flags of DeepSpeed's experts."""
EXPERTS_REFUSED = (
    "experts of Megatron-DeepSpeed are routed by DeepSpeed's rules, which are not available; use --num-experts with "
    "--moe-router-topk, --moe-aux-loss-coeff, --moe-layer-freq and --expert-model-parallel-size"
)
"""Refusal of the same flags in a model with experts."""


def fork_ignored() -> dict[str, tuple[str, int]]:
    """Flag -> why it has no effect, and its number of values."""
    return {
        name: (reason, len(values))
        for reason, words in (*IGNORED, (DENSE, _EXPERTS))
        for name, _, values in (word.partition("=") for word in words.split())
    }


def expert_flags() -> frozenset[str]:
    """Flags of DeepSpeed's experts, which have no effect in a model without experts and are refused in another."""
    return frozenset(word.partition("=")[0] for word in _EXPERTS.split())
