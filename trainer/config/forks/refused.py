"""Flags of forks and older releases of Megatron-LM that are refused. Torch-free.

Names: those of the files that ``trainer/config/forks/ignored.py`` names.
"""

from __future__ import annotations

_DEEPSPEED = "is a flag of Megatron-DeepSpeed; "
_ARGONNE = "is a flag of Argonne's Megatron-DeepSpeed; "
_BIGSCIENCE = "is a flag of bigscience's Megatron-DeepSpeed; "
_SWISS = "is a flag of swiss-ai's Megatron-LM; "
_LLMJP = "is a flag of llm-jp's Megatron-LM; "
_OLD = "is a flag of older Megatron-LM; "
_NO_SKIPPING = "use --iterations-to-skip with the number of each iteration; those count here, and make no step"

REFUSED: tuple[tuple[str, str], ...] = (
    (
        _DEEPSPEED + "distillation from a teacher is not supported",
        """
        hidden-size-teacher kd kd-alpha-ce kd-beta-ce kd-temp load-teacher mos num-attention-heads-teacher
        num-experts-teacher num-layers-teacher
        """,
    ),
    (
        _DEEPSPEED + "experts by Switch are not supported; use --num-experts with --moe-router-topk 1",
        "num-experts-switch",
    ),
    (
        _DEEPSPEED + "attention in chunks (FPDT) is not available; use --context-parallel-size",
        "ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading",
    ),
    (
        _DEEPSPEED + "use --ds-sequence-parallel-size or --context-parallel-size with the number of ranks",
        "force-ds-sequence-parallel",
    ),
    (
        _DEEPSPEED + "lessons that grow and layers that drop tokens are not supported; leave the flag out",
        "data-efficiency-curriculum-learning random-ltd return-data-index",
    ),
    (
        _DEEPSPEED + "this way of drawing samples is not available; leave the flag out",
        "repeated-dataloader train-data-exact-num-epochs",
    ),
    (
        _DEEPSPEED + "the order of samples follows from --seed; leave the flag out",
        "train-desc-path train-doc-idx-path train-idx-path train-sample-idx-path train-shuffle-idx-path",
    ),
    (
        _DEEPSPEED + "write the folder into --data-path",
        "aml-data-download-path",
    ),
    (
        _DEEPSPEED + "training begins at the latest checkpoint of a folder; use --load with that folder",
        "load-tag",
    ),
    (
        _DEEPSPEED + "use --finetune, which starts from the weights at iteration 0 with a new optimizer",
        "reset-iteration",
    ),
    (
        _DEEPSPEED + "it draws other masks of dropout in each layout; leave the flag out",
        "scattered-embeddings",
    ),
    (
        _DEEPSPEED + "it trains nothing; use llmctl generate or llmctl evaluate",
        "ds-inference inference use-dataset-only",
    ),
    (
        _ARGONNE + "this optimizer is not available; use --optimizer adam or sgd",
        """
        dshampooadamw-eps dshampooadamw-max-preconditioner-dim dshampooadamw-precondition-freq
        dshampooadamw-use-decoupled-weight-decay muon-ns-steps muonadamw-beta1 muonadamw-beta2 muonadamw-eps
        muonclip-alpha muonclip-t schedulefree-for-each sophiag-beta1 sophiag-beta2 sophiag-rho
        """,
    ),
    (
        _ARGONNE + "this schedule is not available; use --lr-decay-style WSD with --lr-wsd-decay-iters",
        """
        constant-lr lr-constant-fraction lr-constant-plus-cooldown lr-constant-plus-cooldown-frac lr-constant-tokens
        lr-cooldown-fraction lr-cooldown-tokens lr-finder timescale
        """,
    ),
    (
        _ARGONNE + "use --data-path with pairs of weight and path",
        "data-file-list",
    ),
    (
        _ARGONNE + "samples of all files are always mixed by the weights of --data-path; leave the flag out",
        "blend-sample-in-corpus shuffle-sample-in-corpus",
    ),
    (
        _ARGONNE + "use --embedding-init-method-std for tables with a deviation of their own",
        "adjust-word-embedding-init word-embedding-init-std",
    ),
    (_ARGONNE + _NO_SKIPPING, "train-iters-to-skip train-range-to-skip"),
    (_BIGSCIENCE + _NO_SKIPPING, "skip-train-iteration-range"),
    (
        _BIGSCIENCE + "pass the file's contents to the flag without -path at its end",
        """
        test-weighted-split-paths-path train-weighted-split-paths-path valid-weighted-split-paths-path
        """,
    ),
    (
        _BIGSCIENCE + "prefix models and span corruption of GPT are not supported",
        """
        loss-on-targets-only mean-noise-span-length noise-density reweight-loss-based-on-position-frequency
        """,
    ),
    (
        _BIGSCIENCE + "8-bit moments are not available; leave the flag out, and use --embed-layernorm for its norm",
        "use-bnb-optimizer",
    ),
    (
        _BIGSCIENCE + "it trains nothing; use llmctl evaluate",
        "eval-only no-train",
    ),
    (
        _BIGSCIENCE + "models of images are not supported",
        "img-dim",
    ),
    (
        _SWISS + "this optimizer is not available; use --optimizer adam or sgd",
        "ademamix-alpha ademamix-alpha-warmup ademamix-beta3 ademamix-beta3-warmup",
    ),
    (
        _SWISS + "this loss is not available; leave the flag out",
        "goldfish-h goldfish-k goldfish-loss",
    ),
    (
        _SWISS + "use --norm-placement for another place of the norms",
        "layernorm-init no-attn-layernorm no-final-layernorm no-mlp-layernorm post-layer-norm",
    ),
    (
        _SWISS + "this activation is not available; use --swiglu or --squared-relu",
        "xielu xiprelu xiprelup",
    ),
    (
        _SWISS + "a norm of each parameter is not logged; use --log-params-norm",
        "log-params-norm-per-param",
    ),
    (
        _LLMJP + "the schedule needs --train-iters; use --exit-interval with the iteration to end at",
        "force-stop-iter",
    ),
    (
        _LLMJP + "use --save-interval",
        "save-iter-patterns",
    ),
    (
        _OLD + "tokens are dropped with --moe-expert-capacity-factor; leave the flag out",
        "moe-token-dropping",
    ),
    (
        _OLD + "use --expert-model-parallel-size with the number of ranks",
        "expert-parallel",
    ),
    (
        _OLD + "code of another layer is not read; leave the flag out",
        "model-spec",
    ),
    (
        _OLD + "weights of a blend are its shares alone; leave the flag out",
        "renormalize-blend-weights",
    ),
    (
        _OLD + "models with a retriever are not supported",
        "retro-add-retriever retro-cyclic-train-iters retro-project-dir retro-return-doc-ids retro-workdir",
    ),
    (
        "is a flag of Megatron-LM's inference; use llmctl generate",
        """
        inference-dynamic-batching-buffer-guaranteed-fraction inference-dynamic-batching-buffer-overflow-factor
        inference-dynamic-batching-chunk-size inference-dynamic-batching-max-requests-override
        inference-dynamic-batching-max-tokens-override
        """,
    ),
    (
        "checkpoints of NVIDIA's Model Optimizer are not read or written; leave the flag out",
        "export-te-mcore-model load-model-opt-format",
    ),
    (
        "other low precisions are not supported; train with --bf16",
        "keep-fp8-transpose-cache-when-using-custom-fsdp",
    ),
)
"""Sentence and the flags that are refused with it."""


def fork_refused() -> dict[str, str]:
    """Flag -> the sentence of its refusal."""
    return {name: sentence for sentence, names in REFUSED for name in names.split()}
