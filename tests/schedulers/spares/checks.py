"""Runs with a spare node, on any scheduler."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.schedulers.running import ranks_of, words_of
from tests.waiting import wait_for

SAVES = ("--set", "training.train_iters=120", "--set", "checkpoint.save_interval=20")


def nodes_of(site: Any, run_id: str, attempt: int) -> list[str]:
    lines = (site.path(run_id) / f"attempts/{attempt}/hostfile").read_text().splitlines()
    return [line.split()[0] for line in lines]


def end_of(site: Any, run_id: str, attempt: int) -> dict[str, object]:
    return dict(json.loads((site.path(run_id) / f"attempts/{attempt}/exit.json").read_text()))


def agents_of(run_dir: Path, node: int) -> Sequence[int]:
    """Process ids of torchrun on a node, as this machine numbers them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, environ = words_of(int(folder.name), "cmdline"), words_of(int(folder.name), "environ")
        except OSError:
            continue
        is_agent = "torch.distributed.run" in words and f"LLMCTL_RUN_DIR={run_dir}" in environ
        if is_agent and "python" in words[0] and f"NODE_RANK={node}" in environ:
            found.append(int(folder.name))
    return found


def rank_of(run_dir: Path, node: int) -> Sequence[int]:
    """Process id of the only rank on a node."""
    return [pid for pid in ranks_of(run_dir) if f"NODE_RANK={node}" in words_of(pid, "environ")]


def wait_for_steps(site: Any, run_id: str, attempt: int) -> None:
    """Wait for steps of an attempt after its first save."""
    path = site.path(run_id) / "metrics.jsonl"

    def has_steps() -> bool:
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return sum(row["attempt"] == attempt and "lm_loss" in row for row in rows) > 25

    wait_for(has_steps, lambda: f"steps of attempt {attempt}\n{site.job_log(run_id)}")


def check_killed_twice(
    site: Any, run_id: str, losses: dict[int, float], of_node: Callable[[Path, int], Sequence[int]]
) -> None:
    """Kill a process of the second node in two attempts: the third one runs on the spare node, with the same bits.

    Args:
        site: of the scheduler.
        run_id: of a run on two nodes with one spare node.
        losses: of the same training to which nothing happens.
        of_node: process ids of a run on a node, of which one is killed.
    """
    for attempt in (1, 2):
        wait_for_steps(site, run_id, attempt)
        (pid,) = of_node(site.path(run_id), 1)
        os.kill(pid, signal.SIGKILL)
        wait_for((site.path(run_id) / f"attempts/{attempt}/exit.json").exists, "the end of the attempt")
    run = site.ended(run_id)
    assert run["state"] == "completed" and run["attempt"] == 3, f"{run}\n{site.job_log(run_id)}"
    first, second, third = (nodes_of(site, run_id, attempt) for attempt in (1, 2, 3))
    assert first == second and third[0] == first[0] and third[1] not in first, (first, second, third)
    bad = first[1]
    ends = [end_of(site, run_id, attempt) for attempt in (1, 2)]
    assert [(end["first_node"], [*dict(end["leaves_out"])]) for end in ends] == [(bad, []), (bad, [bad])], ends
    assert f"{bad} left out (two failures in a row began there" in run["detail"]
    assert site.losses(run_id) == losses
