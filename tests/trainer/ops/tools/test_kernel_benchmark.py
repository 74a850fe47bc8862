"""The whole benchmark of kernels at tiny sizes, and the figures in its tables."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels import Training, forward_words, store, training_report
from benchmarks.peers.workload import WORKLOADS
from benchmarks.results_table import stored_results, tables
from benchmarks.train_speed import OURS, OURS_REFERENCE, PLAIN_GLIBC, TRAINERS, Result, surroundings
from tests.trainer.ops.tools.test_results_table import DOCUMENT
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[4]


def test_share_of_the_matmul_speed():
    work = WORKLOADS["tiny"]
    # Matrices of 4 layers and the head, and attention; at most 1 % more for norms.
    flops = 6 * (4 * (4 * 256**2 + 3 * 256 * 688) + 4096 * 256) + 12 * 4 * 256 * 256
    result = Result(wall_s=[2.0, 1.0, 9.0], cpu_s=[1.0], peak_mib=[1.0], losses=[1.0], grad_norms=[1.0])
    training = Training("tiny", 1, 3, {"plain": result}, matmul_flops_per_s=10 * flops * work.tokens_per_step)
    assert training.flops_per_token == pytest.approx(flops, rel=0.01)
    assert f"| plain | {work.tokens_per_step / 2:,.0f} | 5.0% |" in training_report(training)


def test_saved_results_give_the_tables_of_the_page(tmp_path):
    result = Result(wall_s=[2.0, 1.0, 9.0], cpu_s=[1.0], peak_mib=[1474.0], losses=[1.0], grad_norms=[1.0])
    trainers = {"ours": result, "plain": Result(failure="it fell over")}
    training = Training("tiny", 1, 3, trainers, matmul_flops_per_s=1e11)
    measured = {name: value for name, value in DOCUMENT.items() if name not in ("date", "training")}
    store(tmp_path, datetime.date(2026, 11, 23), measured, training, "what people read\n")
    lines = tables(stored_results(tmp_path))
    assert "| rms_norm | 4096x4096 | native 4.2x, 61% | native 7.0x, 61% |" in lines
    assert [line for line in lines if line.endswith("| 1,474 |")] and not [line for line in lines if "plain |" in line]
    assert (tmp_path / "kernels-cpu-2026-11-23.md").read_text() == "what people read\n"


def test_operations_measured_without_backward_too():
    sizes = ("5x3x8", "64x4x64") * 2
    rows = [{"device": "cpu", "operation": name, "size": size} for name in ("l2_norm", "rope") for size in sizes]
    larger = [{"device": "cuda", "operation": "rope", "size": "512x32x128"}]
    both = {"measurements": [*rows, *larger]}
    told = ["l2_norm", "--dtype", "float32", "rope=5x3x8,64x4x64"]
    flags = ["--forward", "--dtype", "float32"]
    assert forward_words(both, "cpu", told) == ["rope=5x3x8,64x4x64", *flags, "--device", "cpu"]
    assert forward_words(both, "cuda", ["--dtype", "float32"]) == ["rope=512x32x128", *flags, "--device", "cuda"]
    assert forward_words(both, "cpu", [*told, "--forward"]) == []
    assert forward_words({"measurements": rows[:4]}, "cpu", told) == []


def test_one_trainer_runs_with_glibcs_defaults():
    assert "MALLOC_MMAP_MAX_" in surroundings(TRAINERS["plain"])[1]
    assert not [name for name in surroundings(TRAINERS[PLAIN_GLIBC])[1] if name.startswith("MALLOC_")]


@pytest.mark.proof
def test_the_whole_benchmark(kernel_library):
    del kernel_library  # Built once for all tests.
    flags = ["rms_norm=8x32", "rope=5x3x8", "--dtype", "float32", "--repeats", "3", "--copy-mib", "1"]
    flags += ["--device", "cpu"]
    flags += ["--end-to-end", "--model", "tiny", "--rounds", "1", "--steps", "1"]
    flags += ["--trainers", "plain", OURS_REFERENCE, OURS]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("| rms_norm | 8x32 | float32 | native * |")]
    # Forward and backward; then forward only, with fewer counted bytes.
    assert len([line for line in lines if line.startswith("| rope | 5x3x8 | float32 | native * |")]) == 2
    assert "Forward only:" in lines
    assert "MALLOC_MMAP_MAX_=0" in done.stdout
    used = [line.partition(": ")[::2] for line in lines if line.startswith("- ours")]
    assert dict(used)[f"- {OURS_REFERENCE}"].split(", ")[1].startswith("0 of ")
    assert not dict(used)[f"- {OURS}"].split(", ")[1].startswith("0 of ")
    for name in ("plain", OURS, OURS_REFERENCE):
        # In the table of speed and share, and in the long table.
        assert len([line for line in lines if line.startswith(f"| {name} | ")]) == 2
