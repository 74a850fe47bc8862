"""Training speed of ours beside its peers: the same model, weights, tokens and AdamW, interleaved in one session.

    python -m benchmarks.train_speed --model small --rounds 3 --write

Each round runs every trainer once in every layout, so that a slow minute of the machine meets all of them. The table
gives medians over the timed steps of all rounds, and ratios to the layout's first trainer (plain on one process,
megatron-core on several). CPU seconds are those of all ranks together; they bear other work on the machine, wall time
does not. Losses and gradient norms are compared with the very first run's, plain on one process: a fast trainer that
computes something else is not faster.
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
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINERS = ("plain", "megatron_core", "ours")
LAYOUTS = {"1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp4": (4, 1)}
# glibc gives large tensors back to the kernel at every step and faults them in again; these keep them, for everybody.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "536870912",
    "PYTHONWARNINGS": "ignore",
}
LIMIT_S = 900


@dataclass
class Result:
    """Timed steps of one trainer in one layout, over all rounds."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    version: str = ""


def peers_folder() -> Path:
    """Where benchmarks/peers/set_up.sh puts the environments."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "llmctl-benchmarks"


def python_of(trainer: str) -> str:
    """The interpreter of a trainer: its own environment where it has one, else this one."""
    own = peers_folder() / trainer.replace("_", "-") / "bin/python"
    return str(own) if own.exists() else sys.executable


def run_once(trainer: str, layout: str, flags: argparse.Namespace) -> list[dict]:
    """One run of one trainer: the reports of its ranks.

    Raises:
        RuntimeError: a rank failed; its last lines are in the message.
    """
    tp, pp = LAYOUTS[layout]
    world = tp * pp
    with tempfile.TemporaryDirectory() as place:
        argv = [python_of(trainer), "-m", f"benchmarks.peers.{trainer}", "--model", flags.model]
        argv += ["--tp", str(tp), "--pp", str(pp), "--steps", str(flags.warm_up + flags.steps), "--report", place]
        ranks = []
        for rank in range(world):
            place_among_ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            with Path(place, f"rank-{rank}.log").open("w") as log:
                ranks.append(
                    subprocess.Popen(
                        argv,
                        cwd=ROOT,
                        env=os.environ | ENVIRONMENT | place_among_ranks,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            codes = [process.wait(timeout=LIMIT_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        for rank, code in enumerate(codes):
            if code:
                tail = Path(place, f"rank-{rank}.log").read_text()[-2000:]
                raise RuntimeError(f"{trainer} {layout} rank {rank} left with {code}:\n{tail}")
        return [json.loads(Path(place, f"rank-{rank}.json").read_text()) for rank in range(world)]


def add(result: Result, reports: list[dict], warm_up: int) -> None:
    """Take one run into the result: a step takes as long as its slowest rank, and the CPU time of all."""
    steps = list(zip(*(report["steps"] for report in reports), strict=True))
    result.wall_s += [max(rank["wall_s"] for rank in step) for step in steps[warm_up:]]
    result.cpu_s += [sum(rank["cpu_s"] for rank in step) for step in steps[warm_up:]]
    result.peak_mib.append(max(report["peak_mib"] for report in reports))
    result.losses = [next(rank["loss"] for rank in step if rank["loss"] is not None) for step in steps]
    result.grad_norms = [step[0]["grad_norm"] for step in steps]
    result.version = f"{reports[0]['version']} (torch {reports[0]['torch']})"


def table(results: dict[str, Result], truth: Result, tokens_per_step: int) -> list[str]:
    """Rows of one layout; ratios are to its first trainer, differences to the run taken as the truth."""
    reference = next(iter(results.values()))
    lines = [
        "| trainer | tokens/s | ratio | CPU s/step | ratio | peak MiB/rank | largest loss difference | of grad norm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        wall, cpu = statistics.median(result.wall_s), statistics.median(result.cpu_s)
        speed = statistics.median(reference.wall_s) / wall
        work = cpu / statistics.median(reference.cpu_s)
        off = max(abs(a - b) for a, b in zip(result.losses, truth.losses, strict=True))
        norm = max(abs(a / b - 1) for a, b in zip(result.grad_norms, truth.grad_norms, strict=True))
        lines.append(
            f"| {name} | {tokens_per_step / wall:,.0f} | {speed:.3f} | {cpu:.3f} | {work:.3f} "
            f"| {max(result.peak_mib):,.0f} | {off:.1e} | {norm:.1e} |"
        )
    return lines


def processor() -> str:
    """Name of this machine's processor."""
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} x {found[0].split(':')[1].strip()}" if found else platform.processor()


def report(flags: argparse.Namespace, results: dict[str, dict[str, Result]], load: tuple[float, float]) -> str:
    """The whole measurement as Markdown."""
    from benchmarks.peers.workload import WORKLOADS

    work = WORKLOADS[flags.model]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    versions = {name: result.version for per in results.values() for name, result in per.items()}
    lines = [
        f"# Training speed, {flags.model}, {today}",
        "",
        f"{work.parameters / 1e6:.1f} M parameters, {work.layers} layers of {work.hidden}, sequence {work.sequence}, "
        f"vocabulary {work.vocab}, {work.micro_batches} micro-batches of {work.micro_batch}; float32, gloo, one thread "
        f"per process, one allocator setting for all.",
        f"{processor()}, {platform.platform()}; {flags.rounds} rounds of {flags.steps} timed steps after "
        f"{flags.warm_up}; load average {load[0]:.1f} before and {load[1]:.1f} after.",
        "Ratio of tokens/s: above 1 is faster than the first row. Ratio of CPU seconds: below 1 is cheaper.",
        "plain and megatron-core measure the gradient norm with torch's CPU norm, which loses digits on large tensors "
        "(1e-4 at a million elements, 1e-3 at 16 million); ours does not.",
        "",
        *(f"- {name}: {version}" for name, version in versions.items()),
    ]
    truth = next(result for per_trainer in results.values() for result in per_trainer.values())
    for layout, per_trainer in results.items():
        lines += ["", f"## {layout}", "", *table(per_trainer, truth, work.tokens_per_step)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "small"), default="small")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=TRAINERS)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=("1", "tp2"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per run")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the timed ones")
    parser.add_argument("--write", action="store_true", help="also write the table to benchmarks/results")
    flags = parser.parse_args()
    before = os.getloadavg()[0]
    results: dict[str, dict[str, Result]] = {layout: {} for layout in flags.layouts}
    for round_number in range(1, flags.rounds + 1):
        for layout in flags.layouts:
            for trainer in flags.trainers:
                if trainer == "plain" and layout != "1":
                    continue
                print(f"round {round_number}: {trainer} {layout}", file=sys.stderr, flush=True)
                result = results[layout].setdefault(trainer, Result())
                add(result, run_once(trainer, layout, flags), flags.warm_up)
    text = report(flags, results, (before, os.getloadavg()[0]))
    print(text)
    if flags.write:
        day = datetime.datetime.now(datetime.timezone.utc).date()
        results_folder = Path(__file__).with_name("results")
        results_folder.mkdir(exist_ok=True)
        (results_folder / f"train_speed-{flags.model}-{day}.md").write_text(text)


if __name__ == "__main__":
    main()
