"""Share of slow ranks that ``llmctl status`` names, with its false alarms.

    python -m benchmarks.slow_ranks [--runs 6] [--ranks 4] [--rounds 8] [--factor 1.2] [--noise 0.05] [--write]

Several trainings run beside one another on this machine. A step of a rank takes ``STEP_S``, with a normal deviation
from step to step, and ``factor`` times as long on the culprit of the round, which is drawn for each run; in one of four
rounds there is none. The ranks sleep for that time, so that many of them fit on two cores; all else is a run's own:
the samples, the heartbeats and the status. A round is right if exactly the culprit is named at its end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from llmctl.runs.failures.slow import WINDOWS
from tests.faults.beds import CONFIG, LocalSite
from tests.schedulers.slurm_site import Site
from tests.waiting import wait_for
from trainer.training.busy_share import WINDOW_S

RESULTS = Path(__file__).parent / "results"
ROUND_S = (WINDOWS + 1) * WINDOW_S + 10
"""Whole windows of a round, which begins within one, and the time until a heartbeat tells of the last."""
GOAL = 0.97
STEP_S = 1.0
HOOKS = f"""
import os
import random
import time
from pathlib import Path

RUN = Path(os.environ["LLMCTL_RUN_DIR"]) if "LLMCTL_RUN_DIR" in os.environ else None
FACTOR, NOISE = float(os.environ.get("FACTOR", "1")), float(os.environ.get("NOISE", "0"))


def rate(step, config):
    culprit = RUN / "culprit"
    is_slow = culprit.exists() and culprit.read_text() == os.environ["RANK"]
    time.sleep({STEP_S} * max(0.1, random.gauss(1, NOISE)) * (FACTOR if is_slow else 1))
    return config.optimizer.lr
"""


@dataclass(frozen=True)
class Round:
    """The culprit of a round of a run, if there is one, and the ranks that were named."""

    culprit: int | None
    named: tuple[int, ...]

    @property
    def is_right(self) -> bool:
        """True if the culprit is named, and nobody else."""
        return self.named == (() if self.culprit is None else (self.culprit,))


def start(site: Site, options: argparse.Namespace) -> list[str]:
    """Start the trainings; returns their ids once all of them train."""
    changes = {
        "training": {**CONFIG["training"], "train_iters": 1_000_000, "global_batch_size": options.ranks},
        "hooks": {"lr_function": "slow_hooks:rate"},
        "checkpoint": {},
        "job": {"nodes": options.ranks, "code": ["slow_hooks.py"]},
    }
    site.home.joinpath("s.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
    site.home.joinpath("slow_hooks.py").write_text(HOOKS)
    words = ("--cluster", "local", "--env", f"FACTOR={options.factor}", "--env", f"NOISE={options.noise}")
    runs = [f"r{number}" for number in range(options.runs)]
    for run_id in runs:
        site.llmctl("submit", "s.yaml", "--run-id", run_id, *words)
        wait_for(lambda name=run_id: site.iteration(name) > 1, f"steps of {run_id}")
    return runs


def named(site: Site, run_id: str) -> tuple[int, ...]:
    """Ranks that ``llmctl status`` calls slow."""
    told = re.search(r"slower than the other ranks[^\"]*", json.dumps(site.status(run_id)))
    return tuple(int(rank) for rank in re.findall(r"rank (\d+) on", told[0])) if told else ()


def measure(options: argparse.Namespace) -> list[Round]:
    """All rounds of all runs."""
    rng, found = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as folder:
        site = LocalSite(None, Path(folder) / "home")
        site.prepare()
        runs = start(site, options)
        for number in range(options.rounds):
            culprits = {run_id: None if number % 4 == 3 else rng.randrange(options.ranks) for run_id in runs}
            for run_id, culprit in culprits.items():
                (site.path(run_id) / "culprit").write_text("" if culprit is None else str(culprit))
            time.sleep(ROUND_S)
            for run_id, culprit in culprits.items():
                found.append(Round(culprit, named(site, run_id)))
                print(f"round {number} of {run_id}: culprit {culprit}, named {found[-1].named}", file=sys.stderr)
        for run_id in runs:
            site.llmctl("cancel", run_id, "--grace", "1")
            site.ended(run_id)
    return found


def table(rounds: list[Round], options: argparse.Namespace) -> list[str]:
    """Lines of the page."""
    slow = [one for one in rounds if one.culprit is not None]
    clean = [one for one in rounds if one.culprit is None]
    right = sum(one.is_right for one in slow)
    innocent = sum(bool(set(one.named) - {one.culprit}) for one in rounds)
    return [
        f"{datetime.date.today()}, {os.cpu_count()} cores: {options.runs} runs of {options.ranks} ranks, steps of "
        f"{STEP_S:g} s with a deviation of {options.noise:.0%}; one rank {options.factor:g} times as slow for "
        f"{ROUND_S / 60:.1f} minutes.",
        "",
        "| rounds | number | as they should be |",
        "| --- | --- | --- |",
        f"| with a slow rank: exactly that rank is named | {len(slow)} | {right} ({right / max(1, len(slow)):.1%}) |",
        f"| without one: nobody is named | {len(clean)} | {sum(one.is_right for one in clean)} |",
        f"| of both: nobody else is named | {len(rounds)} | {len(rounds) - innocent} |",
    ]


def main() -> int:
    """Measure and print; 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--factor", type=float, default=1.2)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    options = parser.parse_args()
    rounds = measure(options)
    lines = table(rounds, options)
    print("\n".join(lines))
    if options.write:
        path = RESULTS / f"slow_ranks-{datetime.date.today()}.md"
        path.write_text("\n".join(["# Slow ranks that are named", "", *lines, ""]), encoding="utf-8")
    slow = [one for one in rounds if one.culprit is not None]
    return 0 if sum(one.is_right for one in slow) >= GOAL * len(slow) else 1


if __name__ == "__main__":
    sys.exit(main())
