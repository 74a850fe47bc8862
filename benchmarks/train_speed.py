"""Training speed of our trainer and its peers on the same model and data.

    benchmarks/peers/set_up.sh
    python -m benchmarks.train_speed --model small --rounds 3 --write

Each round runs every trainer once in each of its layouts, so that other load affects all of them. Every round starts
with another trainer. The table gives medians over the timed steps of all rounds, and ratios to the best peer of the
layout. CPU seconds are the sum over all ranks; unlike wall time, they are robust against other load. Losses and
gradient norms are compared with those of the first run, plain on one process, because a trainer that computes something
else is not comparable. A trainer that fails in a layout is listed with the reason, and not run there again.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import WORKLOADS

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Layout:
    """Parallel layout, and its section of the results."""

    section: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero_bubble: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Trainer:
    """An adapter in benchmarks/peers with its layouts, environment and source tree."""

    module: str
    layouts: tuple[str, ...]
    environment: str | None = None
    source: str | None = None
    zero_bubble: str | None = None
    """The adapter's name of its zero-bubble schedule."""
    arguments: tuple[str, ...] = ()
    """Further flags of the adapter."""
    keeps_memory: bool = True
    """True to run with the allocator settings of ENVIRONMENT."""


LAYOUTS = {
    "1": Layout("1"),
    "tp2": Layout("tp2", tp=2),
    "pp2": Layout("pp2", pp=2),
    "pp2-zb": Layout("pp2", pp=2, zero_bubble=True),
    "dp2": Layout("dp2", dp=2),
    "tp4": Layout("tp4", tp=4),
}
OURS = "ours"
OURS_REFERENCE = f"{OURS} on reference kernels"
PLAIN_GLIBC = "plain with glibc's defaults"
TRAINERS = {
    "plain": Trainer("plain", ("1", "dp2")),
    "transformers": Trainer("transformers_llama", ("1", "tp2", "dp2", "tp4"), "trainers"),
    "picotron": Trainer("picotron_llama", ("1", "tp2", "pp2", "dp2", "tp4"), "trainers", "picotron"),
    "torchtitan": Trainer(
        "torchtitan_llama", ("1", "tp2", "pp2", "pp2-zb", "dp2", "tp4"), "trainers", zero_bubble="ZBVZeroBubble"
    ),
    "megatron-core": Trainer("megatron_core", ("1", "tp2", "pp2", "dp2", "tp4"), "megatron-core"),
    OURS: Trainer("ours", tuple(LAYOUTS), zero_bubble="zb-h1"),
    # To measure the effect of kernels and allocator.
    OURS_REFERENCE: Trainer("ours", ("1",), arguments=("--kernels", "reference")),
    PLAIN_GLIBC: Trainer("plain", ("1",), keeps_memory=False),
}
COMPARED = [name for name in TRAINERS if name not in (OURS_REFERENCE, PLAIN_GLIBC)]
# By default glibc returns the memory of large tensors to the operating system at every step. These settings, which all
# trainers get, keep it and avoid the page faults.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "536870912",
    "PYTHONWARNINGS": "ignore",
}
LIMIT_S = 900


class RunFailed(Exception):
    """A trainer did not finish; the message is its last line of output."""


@dataclass
class Result:
    """Timed steps of one trainer in one layout, over all rounds."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    version: str = ""
    torch: str = ""
    failure: str = ""

    def add(self, reports: list[dict[str, Any]], warm_up: int) -> None:
        """Add one run: wall time of the slowest rank, CPU time of all ranks."""
        steps = list(zip(*(report["steps"] for report in reports), strict=True))
        self.wall_s += [max(rank["wall_s"] for rank in step) for step in steps[warm_up:]]
        self.cpu_s += [sum(rank["cpu_s"] for rank in step) for step in steps[warm_up:]]
        self.peak_mib.append(max(report["peak_mib"] for report in reports))
        # Ranks of one replica agree, and replicas have equal shares of the step.
        self.losses = [statistics.mean(r["loss"] for r in step if r["loss"] is not None) for step in steps]
        self.grad_norms = [step[0]["grad_norm"] for step in steps]
        self.version, self.torch = reports[0]["version"], reports[0]["torch"]


def peers_folder() -> Path:
    """Folder of the environments that benchmarks/peers/set_up.sh makes."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "llmctl-benchmarks"


def surroundings(trainer: Trainer) -> tuple[str, dict[str, str]]:
    """The interpreter and the environment variables of a trainer.

    Raises:
        RunFailed: set_up.sh has not made the trainer's environment.
    """
    left_out = "MALLOC_" if not trainer.keeps_memory else "\0"
    variables = {k: v for k, v in (os.environ | ENVIRONMENT).items() if not k.startswith(left_out)}
    for name in (trainer.environment, trainer.source):
        if name is not None and not (peers_folder() / name / "ready").exists():
            raise RunFailed(f"there is no {peers_folder() / name}; run benchmarks/peers/set_up.sh")
    if trainer.source is not None:
        variables["PYTHONPATH"] = str(peers_folder() / trainer.source)
    if trainer.environment is None:
        return sys.executable, variables
    return str(peers_folder() / trainer.environment / "bin/python"), variables


def first_to_fail(ranks: list[subprocess.Popen[bytes]]) -> tuple[int, str] | None:
    """Wait for all ranks. Return the first failed or late rank with the reason.

    On a failure all other ranks are killed.
    """
    until = time.monotonic() + LIMIT_S
    try:
        while True:
            codes = [process.poll() for process in ranks]
            for rank, code in enumerate(codes):
                if code:
                    return rank, f"exited with code {code}"
            if None not in codes:
                return None
            if time.monotonic() > until:
                return codes.index(None), f"was still running after {LIMIT_S} s"
            time.sleep(0.2)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def last_words(log: Path) -> str:
    """The last non-empty line of a rank's output."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith(("[rank", "terminate called"))]
    return said[-1][:300] if said else "no output"


def run_once(name: str, layout_name: str, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one trainer in one layout, and return the reports of its ranks.

    Raises:
        RunFailed: a rank failed, or did not end within the limit.
    """
    trainer, layout = TRAINERS[name], LAYOUTS[layout_name]
    python, variables = surroundings(trainer)
    with tempfile.TemporaryDirectory() as place:
        argv = [python, "-m", f"benchmarks.peers.{trainer.module}", "--model", flags.model, "--report", place]
        argv += ["--tp", str(layout.tp), "--pp", str(layout.pp), "--dp", str(layout.dp)]
        argv += ["--steps", str(flags.warm_up + flags.steps), *trainer.arguments]
        if layout.zero_bubble and trainer.zero_bubble is not None:
            argv += ["--schedule", trainer.zero_bubble]
        ranks = []
        for rank in range(layout.world):
            place_among_ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(layout.world)}
            with Path(place, f"rank-{rank}.log").open("w") as log:
                ranks.append(
                    subprocess.Popen(
                        argv,
                        cwd=ROOT,
                        env=variables | place_among_ranks,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        failed = first_to_fail(ranks)
        if failed is not None:
            rank, what = failed
            raise RunFailed(f"rank {rank} {what}: {last_words(Path(place, f'rank-{rank}.log'))}")
        return [json.loads(Path(place, f"rank-{rank}.json").read_text()) for rank in range(layout.world)]


def measure(flags: argparse.Namespace, number: int, results: dict[str, dict[str, Result]]) -> None:
    """Run one round, and add to the results by section and row."""
    first = number % len(flags.trainers)
    # The very first run is plain on one process, the reference for all others.
    order = flags.trainers[first:] + flags.trainers[:first]
    for layout_name in flags.layouts:
        layout = LAYOUTS[layout_name]
        for name in order:
            if layout_name not in TRAINERS[name].layouts:
                continue
            row = f"{name}, {TRAINERS[name].zero_bubble}" if layout.zero_bubble else name
            result = results.setdefault(layout.section, {}).setdefault(row, Result())
            if result.failure:
                continue
            print(f"round {number + 1}: {name} {layout_name}", file=sys.stderr, flush=True)
            try:
                result.add(run_once(name, layout_name, flags), flags.warm_up)
            except RunFailed as failure:
                result.failure = str(failure)
                print(f"{name} {layout_name} failed: {failure}", file=sys.stderr, flush=True)


def best_peer(results: dict[str, Result], name: str, figure: Callable[[Result], float]) -> float | None:
    """Lowest figure of the peers for a comparison with a row; None without measurements.

    1F1B is compared with 1F1B, a named schedule with all schedules.
    """
    peers = [peer for peer in results if not peer.startswith(OURS) and ("," in name or "," not in peer)]
    return min((figure(results[peer]) for peer in peers if results[peer].wall_s), default=None)


def wall(result: Result) -> float:
    return statistics.median(result.wall_s)


def cpu(result: Result) -> float:
    return statistics.median(result.cpu_s)


def peak(result: Result) -> float:
    return max(result.peak_mib)


def ratio(above: float | None, below: float | None) -> str:
    return "" if above is None or below is None else f"{above / below:.3f}"


def table(results: dict[str, Result], truth: Result, tokens_per_step: int) -> list[str]:
    """Rows of one section, with ratios to the best peer and differences to ``truth``."""
    lines = [
        "| trainer | tokens/s | of the fastest peer | CPU s/step | of the cheapest peer | peak MiB/rank "
        "| of the leanest peer | largest loss difference | of grad norm |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for name, result in results.items():
        if result.failure:
            notes.append(f"- {name} failed after {len(result.peak_mib)} rounds: {result.failure}")
        if not result.wall_s:
            lines.append(f"| {name} | failed | | | | | | | |")
            continue
        fastest, cheapest, leanest = (best_peer(results, name, figure) for figure in (wall, cpu, peak))
        off = max(abs(a - b) for a, b in zip(result.losses, truth.losses, strict=True))
        norm = max(abs(a / b - 1) for a, b in zip(result.grad_norms, truth.grad_norms, strict=True))
        lines.append(
            f"| {name} | {tokens_per_step / wall(result):,.0f} | {ratio(fastest, wall(result))} "
            f"| {cpu(result):.3f} | {ratio(cpu(result), cheapest)} "
            f"| {peak(result):,.0f} | {ratio(peak(result), leanest)} | {off:.1e} | {norm:.1e} |"
        )
    return [*lines, *([""] if notes else []), *notes]


def processor() -> str:
    """Name of this machine's processor."""
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} x {found[0].split(':')[1].strip()}" if found else platform.processor()


def warning_of_builds(measured: dict[str, Result]) -> list[str]:
    """A warning if trainers ran with different builds of torch."""
    names: dict[str, list[str]] = {}
    for name, result in measured.items():
        names.setdefault(result.torch, []).append(name)
    if len(names) < 2:
        return []
    builds = "; ".join(f"{build} under {', '.join(of_build)}" for build, of_build in names.items())
    return [f"The trainers ran with different builds of torch, whose speed may differ: {builds}."]


def report(
    flags: argparse.Namespace, results: dict[str, dict[str, Result]], rounds: int, load: tuple[float, float]
) -> str:
    """All measurements as Markdown."""
    work = WORKLOADS[flags.model]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    everything = [(name, result) for rows in results.values() for name, result in rows.items()]
    measured = {name.partition(",")[0]: result for name, result in everything if result.version}
    lines = [
        f"# Training speed, {flags.model}, {today}",
        "",
        f"{work.parameters / 1e6:.1f} M parameters, {work.layers} layers of {work.hidden}, sequence {work.sequence}, "
        f"vocabulary {work.vocab}, {work.micro_batches} micro-batches of {work.micro_batch}; float32, gloo, one thread "
        f"per process, the same allocator settings for all.",
        f"{processor()}, {platform.platform()}; {rounds} rounds of {flags.steps} timed steps after "
        f"{flags.warm_up}; load average {load[0]:.1f} before and {load[1]:.1f} after.",
        "Tokens/s of the fastest peer: above 1 is faster than every peer. CPU seconds and memory: below 1 is less than "
        "every peer.",
        "Every pipeline is divided as its trainer does by default. The schedule is 1F1B unless the row names another; "
        "the only peer with a zero-bubble schedule is torchtitan (ZBV, two virtual stages per rank). Rows of 1F1B are "
        "compared with the peers' 1F1B, the others with the best of all.",
        "All but ours measure the gradient norm with torch's CPU norm, which loses digits on large tensors (1e-4 at a "
        "million elements, 1e-3 at 16 million).",
        "picotron's pipeline makes gradients too large by the number of micro-batches; clipping hides it from losses.",
        *warning_of_builds(measured),
        "",
        *(f"- {name}: {result.version} (torch {result.torch})" for name, result in measured.items()),
    ]
    truth = next((result for _, result in everything if result.wall_s), Result())
    for section, rows in results.items():
        lines += ["", f"## {section}", "", *table(rows, truth, work.tokens_per_step)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="small")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=COMPARED)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["1", "tp2", "pp2", "pp2-zb", "dp2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per run")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the timed ones")
    parser.add_argument("--write", action="store_true", help="also write the table to benchmarks/results")
    flags = parser.parse_args()
    before = os.getloadavg()[0]
    results: dict[str, dict[str, Result]] = {}
    text = ""
    for number in range(flags.rounds):
        measure(flags, number, results)
        text = report(flags, results, number + 1, (before, os.getloadavg()[0]))
        if flags.write:
            # After every round, so that an interrupted measurement keeps its complete rounds.
            day = datetime.datetime.now(datetime.timezone.utc).date()
            results_folder = Path(__file__).with_name("results")
            results_folder.mkdir(exist_ok=True)
            (results_folder / f"train_speed-{flags.model}-{day}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
