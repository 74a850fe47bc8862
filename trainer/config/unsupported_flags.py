"""Flags of Megatron-LM that are rare in scripts of language models and are refused. Torch-free.

Names: megatron/training/arguments.py and the dataclasses that it makes flags of, at NVIDIA/Megatron-LM@d98e8a64.
"""

from __future__ import annotations

UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (
        "training begins at the latest checkpoint of a folder; use --load with that folder",
        """
        ckpt-step override-ckpt-iteration
        """,
    ),
    (
        "use --keep-last",
        """
        save-retain-interval
        """,
    ),
    (
        "weights of every layout start alike from --init-method-std; leave the flag out",
        """
        no-initialization
        """,
    ),
    (
        "all weights follow one learning rate; leave the flag out",
        """
        freeze-all-layers
        """,
    ),
    (
        "biases and norms never decay, everything else does; leave the flag out",
        """
        apply-wd-to-qk-layernorm no-weight-decay-cond-type
        """,
    ),
    (
        "no batch is made smaller for the number of replicas; use a --global-batch-size that they divide",
        """
        decrease-batch-size-if-needed
        """,
    ),
    (
        "use --rope-scaling with rope_type=linear factor=N",
        """
        rotary-seq-len-interpolation-factor
        """,
    ),
    (
        "other low precisions are not supported; train with --bf16",
        """
        disable-fp8-wgrad first-last-layers-bf16 fp4-format fp4-param-gather fp4-quantizer-factory fp4-recipe
        fp8-output-proj fp8-param-gather fp8-quantizer-factory fp8-recipe keep-fp8-transpose-cache
        kitchen-config-file kitchen-recipe-number moe-router-padding-for-fp8
        moe-router-padding-for-quantization no-fp8-wgrad num-layers-at-end-in-bf16 num-layers-at-start-in-bf16
        reuse-grad-buf-for-mxfp8-param-ag te-precision-config-file
        """,
    ),
    (
        "this optimizer is not available; use --optimizer adam or sgd",
        """
        lion-beta1 lion-beta2 muon-coefficient-type muon-extra-scale-factor muon-fp32-matmul-prec
        muon-momentum muon-nesterov muon-no-split-qkv muon-num-ns-steps muon-scalar-optimizer muon-scale-mode
        muon-tp-mode muon-use-syrk
        """,
    ),
    (
        "activation offloading is not supported; use --recompute-granularity full, or --optimizer-cpu-offload",
        """
        activation-offload-fraction cpu-offloading-retain-pinned-cpu-buffers delay-offload-until-cuda-graph
        delta-offload-bytes-across-pp-ranks fine-grained-activation-offloading
        fine-grained-offloading-max-inflight-offloads min-offloaded-tensor-size offload-modules
        """,
    ),
    (
        "is not supported; leave the flag out",
        """
        adlr-autoresume adlr-autoresume-interval attention-output-gate
        batch-invariant-backend batch-invariant-mode cache-mla-latents check-for-large-grads
        config-logger-dir
        ddp-param-name-patterns-for-fp32-local-accumulation ddp-reduce-scatter-with-fp32-accumulation
        disable-dsa-indexer-rotate-activation
        disable-dsa-indexer-scoring-relu disable-mamba-mem-eff-path distributed-timeout-seconds-after-init
        dump-param-to-param-group-map enable-experimental enable-full-sharding-in-hsdp enable-mhc-connections
        exit-signal exit-signal-handler-for-dataloader expert-tensor-parallel-num-weight-shards
        fake-process-group fp16-lm-cross-entropy fp32-residual-connection
        fsdp-db-use-persist-buf-on-alloc-fail gpu-sniff-test-interval gtp-expert-remat-nccl-ub
        gtp-remat-nccl-ub gtp-remat-opt-in-modules gtp-remat-reduce-scatter-with-fp32-accumulation
        hybrid-context-parallel lazy-mpu-init max-seqlen-per-dp-cp-rank
        megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-grad-comm-dtype
        megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype megatron-fsdp-max-pool-double-buffer
        megatron-fsdp-version mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num
        mhc-sinkhorn-iterations mlp-chunks-for-training moe-combine-bwd-dtype moe-dispatch-fwd-dtype
        moe-enable-routing-replay moe-expert-rank-capacity-factor moe-latent-size moe-mlp-glu-interleave-size
        moe-pad-experts-for-cuda-graph-inference moe-paged-stash moe-paged-stash-buffer-size-factor-cpu
        moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size moe-router-force-biased
        moe-router-quantile-balancing-ema moe-shared-expert-glu-interleave-size moe-single-grouped-bias
        moe-single-grouped-weight moe-upcycling-granularity mrope-section mtp-detach-heads mtp-hsm
        mtp-standalone mtp-use-repeated-layer no-dsa-indexer-rotate-activation
        no-dsa-indexer-scoring-relu no-use-layer-wise-param-layout onnx-safe
        outer-dp-sharding-strategy output-logit-dtype qk-clip qk-clip-alpha qk-clip-threshold
        result-rejected-tracker-filename run-workload-inspector-server symmetric-ar-type
        tensor-parallel-num-weight-shards train-sync-interval use-kitchen-attention
        yaml-cfg
        """,
    ),
    (
        "this change of the data is not supported; leave the flag out",
        """
        allow-ambiguous-pad-tokens dataloader-inter-document-masking fim-data fim-eod-token fim-fragment-rate
        fim-middle-token fim-no-prefix fim-pad-token fim-prefix-token fim-rate fim-split-sample fim-spm-rate
        fim-suffix-token mid-level-dataset-surplus object-storage-cache-path per-dataset-sequences-path
        phase-transition-iterations sample-rate
        """,
    ),
    (
        "is a flag of Megatron-LM's inference; use llmctl generate",
        """
        bert-embedder-type decode-only-cuda-graphs enable-chunked-prefill flash-decode
        inference-batch-times-seqlen-threshold inference-coordinator-port inference-cuda-graph-all-prefills
        inference-cuda-graph-max-tokens inference-cuda-graph-scope inference-disable-ep-consensus
        inference-disable-triton-nvls-kernels inference-dynamic-batching
        inference-dynamic-batching-async-sched-mode inference-dynamic-batching-block-size
        inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-cuda-graph-mixed-prefill-count
        inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-logprobs-mode
        inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
        inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs
        inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-prefix-caching
        inference-dynamic-batching-prefix-caching-coordinator-policy
        inference-dynamic-batching-prefix-caching-eviction-policy
        inference-dynamic-batching-prefix-caching-mamba-gb
        inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-sampling-backend
        inference-dynamic-batching-track-generated-token-events
        inference-dynamic-batching-track-paused-request-events inference-dynamic-batching-unified-memory-level
        inference-fuse-tp-communication inference-grouped-gemm-backend inference-logging-step-interval
        inference-max-requests inference-max-seq-length inference-moe-disable-fused-quant-kernels
        inference-moe-token-dispatcher-type inference-rng-tracker inference-shards
        inference-text-gen-server-logging inference-use-synchronous-zmq-collectives inference-wandb-logging
        mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype max-tokens-to-oom
        mlp-chunks-for-prefill nccl-all-reduce-for-prefill num-speculative-tokens output-bert-embeddings
        use-legacy-static-engine use-same-sampling-seed-across-dp-ranks
        """,
    ),
    (
        "retrieval models are not supported",
        """
        bert-load biencoder-projection-dim biencoder-shared-query-context-model block-data-path embedding-path
        evidence-data-path ict-head-size ict-load indexer-batch-size indexer-log-interval query-in-block-prob
        retriever-report-topk-accuracies retriever-score-scaling titles-data-path use-one-sent-docs
        """,
    ),
    (
        "a failed rank ends its job, which llmctl submits again; leave the flag out",
        """
        calc-ft-timeouts enable-ft-package ft-num-warmup-iters inprocess-active-world-size
        inprocess-barrier-timeout inprocess-completion-timeout inprocess-empty-cuda-cache
        inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout
        inprocess-last-call-wait inprocess-max-iterations inprocess-monitor-process-interval
        inprocess-monitor-thread-interval inprocess-progress-watchdog-interval inprocess-restart
        inprocess-soft-timeout inprocess-termination-grace-time
        """,
    ),
    (
        "steps are not repeated to find faults; leave the flag out",
        """
        check-for-spiky-loss error-injection-rate error-injection-type
        """,
    ),
    (
        "converts a checkpoint and trains nothing; use llmctl checkpoint import or export",
        """
        ckpt-convert-format ckpt-convert-save
        """,
    ),
    (
        "checkpoints have one kind and one place; use --save, --save-interval and --keep-last",
        """
        load-main-params-from-ckpt
        non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo persistent-save-interval
        replication-factor replication-jump
        save-activations-interval save-dgrads-interval save-params-interval save-tokens-per-expert-interval
        save-wgrads-interval
        """,
    ),
    (
        "models of images are not supported",
        """
        classes-fraction data-per-class-fraction dino-bottleneck-size dino-freeze-last-layer
        dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-norm-last-layer
        dino-teacher-temp dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs img-h img-w iter-per-epoch
        mask-factor mask-type no-data-sharding num-channels num-classes patch-dim swin-backbone-type
        vision-backbone-type vision-pretraining vision-pretraining-type
        """,
    ),
    (
        "data and checkpoints are files; leave the flag out",
        """
        disable-msc enable-msc
        """,
    ),
    (
        "models with state-space, linear or sparse attention are not supported",
        """
        dsa-indexer-head-dim dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff
        dsa-indexer-n-heads dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset dsa-indexer-topk
        dsa-indexer-topk-freq dsa-indexer-use-sparse-loss dsa-kernel-backend experimental-attention-variant
        gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder kitchen-attention-backend
        linear-attention-freq linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads
        linear-num-value-heads linear-value-head-dim mamba-head-dim mamba-num-groups mamba-num-heads
        mamba-state-dim mamba-training-ssm-states-dtype mtp-hybrid-override-pattern
        """,
    ),
    (
        "evaluation uses the training's batches; use --eval-interval, --eval-iters and --valid-data-path",
        """
        eval-global-batch-size eval-micro-batch-size full-validation multiple-validation-sets skip-train
        start-eval-at-iter validation-set-names
        """,
    ),
    (
        "faults are not injected; leave the flag out",
        """
        fault-injector-delay-start-iteration fault-injector-fault-delay fault-injector-fault-probabilities
        fault-injector-fault-types fault-injector-mtti-seconds fault-injector-num-ranks
        fault-injector-offset-seconds fault-injector-ranks fault-injector-seed
        """,
    ),
    (
        "reinforcement learning is not supported",
        """
        grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight grpo-filter-groups-with-same-reward
        grpo-group-size grpo-iterations grpo-kl-beta grpo-prompts-per-step langrl-env-config perform-rl-step
        refit-method rl-consumption-granularity rl-default-temperature rl-default-top-k rl-default-top-p
        rl-durable-rollout-bank rl-generation-lag rl-importance-sampling-truncation-coef
        rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size
        rl-inference-logprobs-is-correction rl-inference-model-unified-memory-level rl-inference-parsers
        rl-inference-pipeline-model-parallel-size rl-inference-tensor-model-parallel-size
        rl-kv-cache-management-mode rl-max-inflight-requests rl-offload-inference-model-weights-when-idle
        rl-offload-optimizer-during-inference rl-partial-rollouts rl-persist-cuda-graphs rl-profile
        rl-profile-dir rl-prompts-per-eval rl-rollout-bank-dir rl-rollout-bank-max-bytes
        rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token
        rl-submission-granularity rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap
        """,
    ),
    (
        "layers of different shapes are not supported",
        """
        heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path
        """,
    ),
    (
        "distillation is not supported",
        """
        logits-load-decode-threads logits-load-dir logits-load-ignore-errors logits-load-kd-loss-alpha
        logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir logits-save-dtype
        logits-save-top-k logits-save-top-p logits-save-top-p-min-k
        """,
    ),
    (
        "these values are not logged; leave the flag out",
        """
        moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits
        moe-routing-trace-dump-weights moe-routing-trace-max-training-iters moe-routing-trace-path
        """,
    ),
    (
        "tokenize each conversation, and use --sample-packing with --answer-only-loss",
        """
        sft-tokenizer-prompt-format
        """,
    ),
)
"""Sentence and the flags that are refused with it."""


def unsupported_flags() -> dict[str, str]:
    """Flag -> the sentence of its refusal."""
    return {name: sentence for sentence, names in UNSUPPORTED for name in names.split()}
