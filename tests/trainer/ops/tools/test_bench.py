"""Benchmark of kernels: correct measurements and reports."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.forked_command import run_trainer
from tests.waiting import HANG_S
from trainer.ops.bench_case import Draw
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.dispatch.registry import OPERATIONS
from trainer.ops.tools import bench_command
from trainer.ops.tools.bench import BENCHES, Plan, Stopwatch

ROOT = Path(__file__).parents[4]
SMALL = {
    "rms_norm": (3, 40),
    "add_rms_norm": (3, 40),
    "layer_norm": (3, 40),
    "activation": (3, 2, 20),
    "rope": (5, 3, 8),
    "adamw": (37, 4),
    "l2_norm": (37,),
    "bias_dropout_add": (40, 50),
    "moe_permute": (7, 2, 8),
    "moe_unpermute": (7, 2, 8),
    "cross_entropy": (5, 40),
    "scaled_masked_softmax": (2, 3, 5, 7),
    "scaled_causal_softmax": (2, 3, 5, 7),
}
BY_NAME = {operation.name: operation for operation in OPERATIONS}


def case_of(name, dtype=torch.float64, size=None):
    draw = Draw(torch.device("cpu"), dtype, torch.Generator().manual_seed(3))
    return BENCHES[name].build(size or SMALL[name], draw)


def outcome(case, function):
    """Results and gradients, or the arguments changed in place."""
    results = function(*case.arguments)
    outputs = [results] if isinstance(results, torch.Tensor) else list(results or ())
    found = [output.detach().clone() for output in outputs]
    leaves = [value for value in case.arguments if isinstance(value, torch.Tensor) and value.requires_grad]
    if leaves:
        generator = torch.Generator().manual_seed(4)
        grads = [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]
        return found + list(torch.autograd.grad(outputs, leaves, grads))
    return found + list(case.arguments[0])


def test_every_operation_is_measured():
    alone = {operation.name for operation in OPERATIONS if operation.implementations.keys() == {"reference"}}
    assert set(BENCHES) == set(SMALL) == set(BY_NAME) - alone


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("adamw", "bias_dropout_add")])
def test_plain_computes_the_same(name):
    ours = outcome(case_of(name), BY_NAME[name].implementations["reference"].function)
    plain = case_of(name)
    theirs = outcome(plain, plain.plain)
    if name == "l2_norm":
        theirs[0] = theirs[0].square()
    for own, other in zip(ours, theirs, strict=True):
        # Plain code that casts to float32 returns float32.
        torch.testing.assert_close(own.double(), other.double(), rtol=1e-4, atol=1e-6)


def test_plain_step_changes_the_same():
    ours, plain = case_of("adamw", torch.float32), case_of("adamw", torch.float32)
    before = ours.arguments[0][0].clone()
    BY_NAME["adamw"].implementations["reference"].function(*ours.arguments)
    plain.plain(*plain.arguments)
    moved = [case.arguments[0][0] - before for case in (ours, plain)]
    assert all(float(change.abs().max()) > 0 for change in moved)
    torch.testing.assert_close(ours.arguments[0][0], plain.arguments[0][0], rtol=1e-6, atol=0)


def test_plain_dropout_drops_as_much():
    case = case_of("bias_dropout_add")
    hidden, bias, residual, *_ = case.arguments
    kept = (case.plain(*case.arguments) - residual) / (hidden + bias)
    assert set(kept.detach().mul(9).round().unique().tolist()) == {0.0, 10.0}
    assert 0.85 < float((kept > 0.5).double().mean()) < 0.95


@pytest.mark.parametrize(
    ("name", "passes"),
    # Counted by hand: float32 reads and writes per element of the first argument.
    [
        ("rms_norm", (2, 3)),
        ("add_rms_norm", (4, 4)),
        ("activation", (1.5, 2.5)),
        ("cross_entropy", (1, 2)),
        ("l2_norm", (1, 0)),
    ],
)
def test_counted_bytes(name, passes):
    case = case_of(name, torch.float32)
    first = case.arguments[0]
    elements = sum(tensor.numel() for tensor in (first if isinstance(first, list) else [first]))
    assert (case.forward_bytes, case.backward_bytes) == tuple(4 * elements * count for count in passes)


def test_counted_bytes_of_a_step():
    # Master and two moments read and written; gradient read in float32 or 16 bits; copy written in 16 bits.
    assert case_of("adamw", torch.bfloat16).forward_bytes == 37 * (3 * 2 * 4 + 4 + 2)
    assert case_of("adamw", torch.bfloat16, (37, 2)).forward_bytes == 37 * (3 * 2 * 4 + 2 + 2)
    assert case_of("adamw", torch.float32).forward_bytes == 37 * (3 * 2 * 4 + 4)
    # Queries and keys rotated in place; gradients of three tensors joined into one.
    rope = case_of("rope", torch.float32)
    assert (rope.forward_bytes, rope.backward_bytes) == (5 * 3 * 8 * 4 * 4, 5 * 3 * 8 * 6 * 4)


class Clock:
    """A clock that advances on request."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def lasting(self, *seconds):
        """A call with these successive durations, of which the last repeats."""
        left = list(seconds)

        def call():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_medians_are_of_single_calls_despite_slow_ones(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "thread_time", clock)
    watch = Stopwatch(torch.device("cpu"), Plan(by_cpu_time=True))
    calls = {"first is slow": clock.lasting(60.0, 0.0001), "some are": clock.lasting(2, 2, 90, 2, 2, 90, 2)}
    assert watch.medians(calls, 5) == pytest.approx({"first is slow": 0.0001, "some are": 2.0})


def test_what_ran_before_a_sample_does_not_count(monkeypatch):
    clock, before = Clock(), []
    monkeypatch.setattr(time, "thread_time", clock)

    def calling(name):
        def call():
            clock.now += 0.0001 if before[-1:] == [name] else 0.1
            before.append(name)

        return call

    watch = Stopwatch(torch.device("cpu"), Plan(by_cpu_time=True))
    assert watch.medians({name: calling(name) for name in "ab"}, 5) == pytest.approx({"a": 0.0001, "b": 0.0001})


def bench_as_is(*words, **environment):
    """Exit code, stdout and stderr of the bench without its restart, forked from the rank server."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return run_trainer("kernels", "bench", *words, "--as-is", cwd=ROOT, environment=variables)


def bench(*words, **environment):
    command = [sys.executable, "-m", "trainer", "kernels", "bench", *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=HANG_S, check=False)


FLAGS = ("--repeats", "3", "--copy-mib", "1", "--device", "cpu")


def test_the_document(kernel_library):
    del kernel_library  # Built so that the bench finds it.
    done = bench("--dtype", "bfloat16", "rms_norm=8x32,4x16", "layer_norm=4x16", "--json", *FLAGS)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = document["measurements"]
    assert document["allocator"]["MALLOC_MMAP_MAX_"] == "0" and len(document["allocator"]) == 3
    assert {(row["operation"], row["size"]) for row in rows} == {
        ("rms_norm", "8x32"),
        ("rms_norm", "4x16"),
        ("layer_norm", "4x16"),
    }
    norms = {row["backend"]: row for row in rows if row["operation"] == "rms_norm" and row["size"] == "8x32"}
    assert set(norms) == {"plain", "reference", "native"} and norms["native"]["is_chosen"]
    for row in norms.values():
        assert row["problem"] == "" and row["seconds"] > 0
        assert row["gb_per_s"] == pytest.approx(5 * 8 * 32 * 2 / row["seconds"] / 1e9)
        assert row["of_plain"] == pytest.approx(norms["plain"]["seconds"] / row["seconds"])
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / document["copy_gb_per_s"]["cpu"])
    # A native kernel that is not faster is not chosen.
    layer = {row["backend"]: row["is_chosen"] for row in rows if row["operation"] == "layer_norm"}
    assert layer["native"] is False and layer["reference"] is True


def test_the_table_names_the_allocator_and_missing_backends(tmp_path):
    code, out, err = bench_as_is(
        "rms_norm=8x32", "--dtype", "float32", *FLAGS, LLMCTL_CACHE_DIR=str(tmp_path), MALLOC_TOP_PAD_="4096"
    )
    assert code == 0, err
    assert "MALLOC_TOP_PAD_=4096" in out and "a copy moves" in out
    assert [line.split()[:4] for line in out.splitlines() if line.split()[:1] == ["rms_norm"]] == [
        ["rms_norm", "8x32", "float32", "plain"],
        ["rms_norm", "8x32", "float32", "reference"],
    ]
    assert "native not measured for rms_norm: the library is not built" in out


def test_forward_alone():
    found = {}
    for flags in ((), ("--forward",)):
        code, out, err = bench_as_is("rms_norm=64x64", "--dtype", "float32", "--json", "--cpu-time", *flags, *FLAGS)
        assert code == 0, err
        document = json.loads(out)
        row = document["measurements"][0]
        found[document["passes"]] = row["gb_per_s"] * row["seconds"]
    assert found["forward"] == pytest.approx(0.4 * found["forward and backward"])


@pytest.mark.parametrize(
    "words",
    [("--threads", "0"), ("--repeats", "0"), ("--copy-mib", "-1"), ("--repeats", "x"), ("--threads", "9" * 12)],
)
def test_numbers_that_are_too_small_or_absurd_are_refused(words, capsys):
    with pytest.raises(SystemExit) as left:
        bench_command.main([*words, "--as-is"], BuildSettings(ROOT / "nowhere"), {})
    assert left.value.code == 2
    assert f"argument {words[0]}: '{words[1]}' is not a number from 1 to 1,000,000" in capsys.readouterr().err


def test_without_a_gpu_none_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["rms_norm=8x32", "--device", "cuda", "--as-is"]
    assert bench_command.main(words, BuildSettings(ROOT / "nowhere"), {}) == 3
    assert (
        capsys.readouterr().err == "trainer kernels bench: --device cuda: torch finds no GPU here; leave --device out\n"
    )


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("norm=8x32", "'norm' is not an operation; valid are rms_norm, "),
        ("rope=8x32", "sequence x heads x width, such as 2048x32x128"),
        ("rms_norm=\u00b2x3", "tokens x hidden, such as 4096x4096"),
        ("rms_norm=", "tokens x hidden, such as 4096x4096"),
    ],
)
def test_wrong_arguments_are_explained(word, said, capsys):
    assert bench_command.main([word, "--as-is"], BuildSettings(ROOT / "nowhere"), {}) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("size", [f"{10**12}x{10**3}", f"{10**30}x1"])
def test_a_size_beyond_memory_is_reported_and_the_rest_is_measured(size, monkeypatch, capsys):
    monkeypatch.setattr("trainer.ops.tools.bench.copy_speed", lambda *_: 1e9)
    words = [f"rms_norm=3x40,{size}", "--dtype", "float32", "--device", "cpu", "--repeats", "1", "--as-is", "--json"]
    assert bench_command.main(words, BuildSettings(ROOT / "nowhere"), {}) == 0
    rows = json.loads(capsys.readouterr().out)["measurements"]
    assert {row["size"]: bool(row["problem"]) for row in rows if row["backend"] == "plain"} == {
        "3x40": False,
        size: True,
    }
    assert all("\n" not in row["problem"] for row in rows)


def test_a_copy_beyond_memory_is_reported(capsys):
    words = ["rms_norm=3x40", "--device", "cpu", "--copy-mib", "1000000", "--as-is"]
    assert bench_command.main(words, BuildSettings(ROOT / "nowhere"), {}) == 3
    said = capsys.readouterr().err
    assert said.startswith("trainer kernels bench: --copy-mib 1000000 is too much: ") and said.count("\n") == 1
