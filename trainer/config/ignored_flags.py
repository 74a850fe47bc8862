"""Flags of Megatron-LM that are rare in scripts of language models and have no effect. Torch-free.

Names: megatron/training/arguments.py and the dataclasses that it makes flags of, at NVIDIA/Megatron-LM@d98e8a64.
"""

from __future__ import annotations

IGNORED: tuple[tuple[str, str], ...] = (
    (
        "the optimizer state is sharded once, over dp x cp; the result is the same",
        """
        num-distributed-optimizer-instances=1
        """,
    ),
    (
        "weights of every layout start alike, and none is made twice",
        """
        init-model-with-meta-device
        """,
    ),
    (
        "Megatron-LM reads the flag only with a checkpoint of NVIDIA's Model Optimizer; --position-embedding-type yarn "
        "with its numbers scales the angles",
        """
        enable-gpt-oss
        """,
    ),
    (
        "Megatron-LM reads the flag only with a checkpoint of NVIDIA's Model Optimizer",
        """
        export-force-local-attention
        """,
    ),
    (
        "the self-checks of Megatron-LM's layers change nothing in the training",
        """
        test-mode
        """,
    ),
    (
        "communication and computation overlap wherever the backend allows",
        """
        defer-embedding-wgrad-compute delay-wgrad-compute disable-align-grad-reduce disable-tp-comm-bulk-dgrad
        disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag
        disable-tp-comm-split-rs tp-comm-bulk-dgrad tp-comm-bulk-wgrad
        ep-overlap-early-attn-memory-release high-priority-a2a-comm-stream
        no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs
        no-tp-comm-split-ag no-tp-comm-split-rs overlap-dispatch-backward-with-experts-wgrad
        overlap-moe-expert-parallel-comm overlap-p2p-communication-warmup-flush
        pipeline-model-parallel-comm-backend=1 tp-comm-bootstrap-backend=1 tp-comm-overlap-rs-dgrad
        use-ring-exchange-p2p wgrad-deferral-limit=1
        """,
    ),
    (
        "kernels are selected for the device; the result is the same",
        """
        cuda-graph-impl=1 cuda-graph-modules=+ cuda-graph-scope=+ cuda-graph-warmup-steps=1
        disable-clone-scatter-output-in-embedding disable-jit-fuser external-cuda-graph
        flash-attention-version=1 fused-residual-rmsnorm mla-down-proj-fusion moe-permute-fusion-into-hybridep
        moe-use-grouped-tensor no-clone-scatter-output-in-embedding no-gradient-reduce-div-fusion
        optimizer-cuda-graph use-fused-weighted-squared-relu use-grouped-gemm-for-dense-mlp
        use-grouped-gemm-for-shared-expert use-te-activation-func use-transformer-engine-op-fuser
        """,
    ),
    (
        "tokens are always dispatched by all-to-all; the result is the same",
        """
        moe-deepep-num-sms=1 moe-flex-dispatcher-backend=1 moe-flex-dispatcher-num-sms=1
        moe-hybridep-num-blocks-permute=1 moe-hybridep-num-blocks-unpermute=1 moe-hybridep-num-sms=1
        moe-hybridep-num-sms-preprocessing=1 moe-hybridep-pad-uneven-dispatch-inputs moe-ncclep-zero-copy
        """,
    ),
    (
        "gradients are always divided by the number of labels that count",
        """
        calculate-per-token-loss
        """,
    ),
    (
        "groups of ranks and their buffers are made for the backend; the result is the same",
        """
        create-all-gather-group ddp-num-buckets=1 ddp-pad-buckets-for-high-nccl-busbw
        disable-gloo-process-groups disable-symmetric-registration empty-unused-memory-level=1
        fsdp-double-buffer fsdp-manual-registration nccl-communicator-config-path=1 no-pin-cpu-grads
        no-pin-cpu-params sharp-enabled-group=1 suggested-communication-unit-size=1
        torch-fsdp2-no-reshard-after-forward use-nccl-ub use-sharp
        """,
    ),
    (
        "jobs on GPUs keep NCCL's flight records of a timeout in the attempt's folder",
        """
        disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
        disable-flight-recorder-include-only-active flight-recorder-dump-path=1
        flight-recorder-include-stack-trace flight-recorder-trace-buffer-size=1
        no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
        no-flight-recorder-include-only-active
        """,
    ),
    (
        "nothing is sent to One Logger or OpenTelemetry",
        """
        app-tag-run-name=1 app-tag-run-version=1 no-one-logger one-logger-async one-logger-project=1
        one-logger-run-name=1 otel-enabled otel-service-name=1 otel-span-groups=1
        """,
    ),
    (
        "a profile has names and times of operations, but no shapes, call stacks, marks for Nsight Systems or memory",
        """
        memory-snapshot-path=1 nvtx-ranges pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
        pytorch-profiler-collect-shapes record-memory-history record-shapes
        """,
    ),
    (
        "rows of metrics.jsonl always have loss_scale",
        """
        disable-log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard
        """,
    ),
    (
        "on CPUs status always names a slow rank; --timing-log-level 1 with --no-barrier-with-level-1-timing shows the "
        "fastest and the slowest rank in each part of a step",
        """
        disable-straggler-on-startup log-straggler straggler-ctrlr-port=1 straggler-minmax-count=1
        """,
    ),
    (
        "energy is not measured, and not logged",
        """
        log-energy
        """,
    ),
    (
        "the largest attention logit is not logged, because the kernels do not keep it",
        """
        log-max-attention-logit
        """,
    ),
    (
        "rows of metrics.jsonl have the memory with --log-memory-to-tensorboard; logging.numbers_interval spaces them",
        """
        log-memory-interval=1
        """,
    ),
    (
        "no progress.txt is written; rows of metrics.jsonl always have iteration, consumed_tokens and the speed",
        """
        log-progress
        """,
    ),
    (
        "messages of the trainer have a single level, and the log of each rank has all of them",
        """
        logging-level=1
        """,
    ),
    (
        "there is a single checkpoint format, which every parallel layout can load",
        """
        async-ckpt-cpu-priority=1 async-ckpt-io-priority=1 async-ckpt-use-cpu-shm async-strategy=1
        auto-detect-ckpt-format ckpt-assume-constant-structure ckpt-convert-update-legacy-dist-opt-format
        ckpt-drop-redundant-extra-state ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo=1
        ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-load-process-group=1
        ckpt-fully-parallel-save ckpt-fully-parallel-save-process-group=1 ckpt-pg-tensors-cache-create
        ckpt-pg-tensors-cache-path=1 disable-ckpt-load-validate-sharding-integrity
        disable-save-tokenizer-assets disable-strict-fsdp-dtensor-load
        disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-format=1 dist-ckpt-optim-fully-reshardable
        dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness=1 dist-ckpt-workers=1
        distrib-optim-fully-reshardable-mem-efficient no-ckpt-fully-parallel-save
        no-ckpt-load-validate-sharding-integrity no-save-tokenizer-assets no-strict-fsdp-dtensor-load
        no-use-tokenizer-model-from-checkpoint-args use-persistent-ckpt-worker verify-integrity
        """,
    ),
    (
        "there is a single checkpoint format, which every parallel layout can load",
        """
        use-dist-ckpt
        """,
    ),
    (
        "copies of the newest state are always on the nodes, each also on a neighbour",
        """
        non-persistent-ckpt-type=local replication
        """,
    ),
    (
        "the random state of a checkpoint is a single seed",
        """
        no-save-rng
        """,
    ),
    (
        "a signal always saves a checkpoint and ends the run",
        """
        exit-signal-handler exit-signal-handler-for-training
        """,
    ),
    (
        "indexed datasets are always memory-mapped, and the loader's work does not change the samples",
        """
        dataloader-defer-npy-index-mmap dataloader-fast-cache-load no-create-attention-mask-in-dataloader
        no-mmap-bin-files num-dataset-builder-threads=1
        """,
    ),
)
"""Reason and flags: with ``=1`` a flag takes a value, with ``=+`` one or more, with ``=WORD`` this one only."""


def ignored_flags() -> dict[str, tuple[str, int, tuple[str, ...]]]:
    """Flag -> why it has no effect, its number of values (-1: one or more), and the only ones; empty for any."""
    result: dict[str, tuple[str, int, tuple[str, ...]]] = {}
    for reason, words in IGNORED:
        for word in words.split():
            name, _, values = word.partition("=")
            number = {"": 0, "+": -1}.get(values, 1)
            only = () if values in ("", "1", "+") else (values,)
            result[name] = (reason, number, only)
    return result
