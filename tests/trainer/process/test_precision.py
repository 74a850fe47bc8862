"""The warnings of slow 16-bit training on CPUs and of moments that bf16 holds up."""

import platform
import subprocess
import sys

import pytest
import torch

from trainer.ops.adamw import ADAMW, AdamWConstants
from trainer.planning.build_config import build_config
from trainer.process.precision import held_moments, precision_warnings, slow_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
_STEPS = {"train_iters": 1, "seq_length": 8}


def warning(device=CPU, fast=(), **training):
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    config = build_config({"model": model, "training": {**_STEPS, **training}, "optimizer": {"lr": 1e-3}})
    return slow_precision(config.training, device, lambda dtype: dtype in fast)


def test_a_slow_dtype_is_named_with_its_remedy():
    said = warning(bf16=True, fast=[FP16])
    assert said.startswith("training.bf16: matrix products in bf16 are slow on this processor")
    assert "remove training.bf16, or train on a GPU" in said
    assert "remove training.fp16, or train on a GPU" in warning(fp16=True)


def test_bf16_is_offered_to_fp16_where_it_is_fast():
    assert "remove training.fp16, or set training.bf16 instead, or train on a GPU" in warning(fp16=True, fast=[BF16])


@pytest.mark.parametrize(
    ("device", "fast", "training"),
    [
        (CPU, [BF16], {"bf16": True}),
        (CPU, [FP16], {"fp16": True}),
        (CPU, [], {}),
        (GPU, [], {"bf16": True}),
        (GPU, [], {"fp16": True}),
    ],
    ids=["fast bf16", "fast fp16", "float32", "bf16 on a GPU", "fp16 on a GPU"],
)
def test_fast_training_needs_no_warning(device, fast, training):
    assert warning(device, fast, **training) is None


@pytest.mark.parametrize(("beta2", "is_held"), [(0.999, True), (0.997, True), (0.996, False), (0.95, False)])
def test_a_mean_that_bf16_holds_up_is_told(beta2, is_held):
    """A mean of which nothing is told falls in every step without a gradient, from any value between neighbours."""
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    optimizer = {"lr": 1e-3, "adam_beta2": beta2, "exp_avg_sq_dtype": "bf16"}
    config = build_config({"model": model, "training": _STEPS, "optimizer": optimizer})
    told = held_moments(config.optimizer)
    assert (told is not None) == is_held
    assert precision_warnings(config, GPU) == ([told] if is_held else [])
    assert told is None or f"with adam_beta2 {beta2} a step changes the mean" in told
    squares = (1.0 + torch.arange(128) / 128).bfloat16()
    fallen, rest = squares.clone(), [torch.zeros(128) for _ in range(3)]
    constants = AdamWConstants(1e-3, 0.9, beta2, 1e-8, 0.0, step=1)
    ADAMW.implementations["reference"].function([rest[0]], [rest[1]], [rest[2]], [fallen], [], constants)
    assert bool((fallen >= squares).any()) == is_held


def test_float32_moments_are_never_held_up():
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    config = build_config({"model": model, "training": _STEPS, "optimizer": {"lr": 1e-3, "exp_avg_dtype": "bf16"}})
    assert held_moments(config.optimizer) is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
def test_avx2_has_no_fast_products():
    code = (
        "import torch; from trainer.process.precision import cpu_has_fast_products as fast; "
        "print(fast(torch.bfloat16), fast(torch.float16))"
    )
    # oneDNN reads its variable once per process.
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "False False\n"
