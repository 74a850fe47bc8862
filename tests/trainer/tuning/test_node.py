"""A contest over two nodes with real trainings, and results of trials from the files of their ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.free_ports import free_ports
from trainer.tuning.contest import Outcome, Trial, TrialResult
from trainer.tuning.measured import is_enough, reason_of, result_of, step_times
from trainer.tuning.node import RESULTS, await_reason, read_results

ROOT = Path(__file__).parents[3]
CONFIG = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256},
    "training": {"train_iters": 1000, "seq_length": 64, "global_batch_size": 4, "device": "cpu"},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
    "logging": {"log_interval": 1},
}
CANDIDATES = [
    {"name": "dp 2", "settings": {}, "seconds": 0.1, "bytes": 100},
    {"name": "tp 2", "settings": {"parallel.tensor_model_parallel_size": 2}, "seconds": 0.2, "bytes": 90},
    {"name": "pp 3", "settings": {"parallel.pipeline_model_parallel_size": 3}, "seconds": 0.3, "bytes": 80},
]


def contest(folder: Path, *, seconds: float = 3600.0) -> list[subprocess.CompletedProcess[str]]:
    """Run both nodes to their end."""
    given = folder / "tuning.json"
    given.write_text(json.dumps({"config": CONFIG, "candidates": CANDIDATES, "steps": 2, "seconds": seconds}))
    command = [sys.executable, "-m", "trainer", "tune", "--tuning", str(given), "--ranks-per-node", "1"]
    port = free_ports(1)[0]
    nodes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **{key: value for key, value in os.environ.items() if not key.startswith("LLMCTL_")},
                **{"LLMCTL_RUN_DIR": str(folder), "NODE_RANK": str(node), "NNODES": "2", "OMP_NUM_THREADS": "1"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    return [subprocess.CompletedProcess(command, 0, each.communicate()[0]) for each in nodes if not each.wait()]


def test_two_nodes_find_the_fastest_layout_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    head, other = contest(tmp_path)
    results = read_results(tmp_path)
    assert [(each.candidate, each.round, each.outcome) for each in results[:3]] == [
        (0, 0, Outcome.OK),
        (1, 0, Outcome.OK),
        (2, 0, Outcome.FAILED),
    ]
    assert "PP 3" in results[2].reason
    assert all(each.seconds and each.bytes for each in results[:2])
    # Two ran, and the faster one has won.
    assert len(results) == 3
    assert "the fastest: " in head.stdout and "round 1: pp 3: failed" in head.stdout
    assert not other.stdout
    # Each trial has a run directory of its own, and saved nothing.
    folders = sorted((tmp_path / "tune").iterdir())
    assert len(folders) == len(results) and len(step_times(folders[0])) >= 2
    assert not list(tmp_path.rglob("checkpoints/*"))
    # Without the last result, whose line was cut off, only that trial runs again.
    lines = (tmp_path / RESULTS).read_text().splitlines()
    (tmp_path / RESULTS).write_text("".join(f"{line}\n" for line in lines[:-1]) + lines[-1][:9])
    contest(tmp_path)
    assert [(each.candidate, each.round) for each in read_results(tmp_path)] == [
        (each.candidate, each.round) for each in results
    ]
    assert len(list((tmp_path / "tune").iterdir())) == len(results) + 1


class Recording:
    """A stand-in for ranks of which the first records its failure when it is asked a third time."""

    def __init__(self, folder: Path) -> None:
        self.asked, self.record = 0, folder / "attempts/1/errors/rank-00000.json"
        self.record.parent.mkdir(parents=True)

    def codes(self) -> list[int | None]:
        self.asked += 1
        if self.asked == 3:
            found = {"consequence": False, "time": 1.0, "type": "ConfigError", "message": "PP 3 does not fit"}
            self.record.write_text(json.dumps(found))
        return [None]


def test_the_reason_of_a_failure_is_awaited_when_another_node_ends_first(tmp_path: Path) -> None:
    ranks = Recording(tmp_path)
    await_reason(tmp_path, ranks)
    assert (ranks.asked, reason_of(tmp_path)) == (3, "ConfigError: PP 3 does not fit")


def test_no_trial_begins_when_the_time_is_over(tmp_path: Path) -> None:
    given = tmp_path / "tuning.json"
    given.write_text(json.dumps({"config": CONFIG, "candidates": CANDIDATES, "steps": 2, "seconds": 0}))
    own = {"LLMCTL_RUN_DIR": str(tmp_path), "NODE_RANK": "0", "NNODES": "1", "MASTER_ADDR": "127.0.0.1"}
    words = ["tune", "--tuning", str(given), "--ranks-per-node", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *words],
        cwd=ROOT,
        env={**os.environ, **own, "MASTER_PORT": str(free_ports(1)[0])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "the time for trials is over\n")
    assert "no layout ran" in done.stderr and not (tmp_path / "tune").exists()
    outside = subprocess.run(
        [sys.executable, "-m", "trainer", *words],
        cwd=ROOT,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outside.returncode == 2 and "use llmctl tune" in outside.stderr


def trial_folder(root: Path, *, rows: int = 0, errors: dict[str, Any] | None = None) -> Path:
    (root / "attempts/1/errors").mkdir(parents=True)
    (root / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"iteration": step, "iteration_time_s": 9.0 if step < 4 else 1.0 + step, "peak_memory_bytes": 5})
            + "\n"
            for step in range(1, rows + 1)
        )
        + '{"iteration": 99, "iter'
    )
    for rank, (message, consequence) in (errors or {}).items():
        record = {"type": "RuntimeError", "message": message, "consequence": consequence, "time": float(rank)}
        (root / f"attempts/1/errors/rank-{int(rank):05d}.json").write_text(json.dumps(record))
    return root


@pytest.mark.parametrize(
    ("errors", "codes", "outcome", "reason"),
    [
        ({"1": ("CUDA out of memory. Tried\nto allocate", False)}, [1], Outcome.OUT_OF_MEMORY, "CUDA out of memory"),
        ({"2": ("a peer", True), "3": ("no such file", False)}, [1, 1], Outcome.FAILED, "RuntimeError: no such file"),
        ({}, [-9], Outcome.OUT_OF_MEMORY, "killed"),
        ({}, [3, 1, 3], Outcome.FAILED, "ranks ended with 1, 3"),
        ({"1": ("broken", False)}, [-9], Outcome.FAILED, "RuntimeError: broken"),
    ],
)
def test_a_failure_is_told_by_its_first_cause(
    tmp_path: Path, errors: dict[str, Any], codes: list[int], outcome: Outcome, reason: str
) -> None:
    found = result_of(Trial(7, 1, 4), trial_folder(tmp_path, rows=4, errors=errors), codes, enough=False)
    assert (found.candidate, found.round, found.outcome, found.seconds) == (7, 1, outcome, None)
    assert reason in found.reason and "\n" not in found.reason


def test_a_trial_is_the_median_of_the_steps_after_the_first(tmp_path: Path) -> None:
    folder = trial_folder(tmp_path, rows=6)
    assert step_times(folder) == [5.0, 6.0, 7.0]
    assert result_of(Trial(0, 0, 3), folder, [], enough=False) == TrialResult(0, 0, Outcome.OK, 6.0, 5)
    assert result_of(Trial(0, 0, 9), folder, [-9], enough=True).seconds == 6.0
    assert step_times(tmp_path / "none") == []


def test_a_hopeless_trial_ends_early() -> None:
    assert is_enough([1.0, 1.0], 2, None) and not is_enough([1.0], 2, None)
    assert is_enough([5.0, 5.0], 9, 2.0) and not is_enough([3.0, 3.0], 9, 2.0) and not is_enough([5.0], 9, 2.0)
