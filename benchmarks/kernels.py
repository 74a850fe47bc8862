"""Speed of the fused kernels against plain torch, per operation and in training.

    benchmarks/peers/set_up.sh
    python -m benchmarks.kernels --end-to-end --write

The kernels are built first. All other flags are passed to ``python -m trainer kernels bench``, such as operations with
their sizes; the default is all operations at their usual sizes. One thread; all rows use the same allocator settings
unless the row says otherwise. The tables of docs/guide/benchmarks.md are made from the files of --write (``python -m
benchmarks.results_table``).
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.ours import train_config
from benchmarks.peers.workload import WORKLOADS, Task
from benchmarks.results_table import RESULTS
from benchmarks.train_speed import (
    COMPARED,
    OURS_REFERENCE,
    PLAIN_GLIBC,
    TRAINERS,
    Result,
    measure,
    peak,
    processor,
    table,
    wall,
)
from trainer.ops.tools.bench_command import COLUMNS, cells, problems
from trainer.planning.flops import flops_per_token

ROOT = Path(__file__).parents[1]
MATMUL_SIZE = 2048
MATMULS = 5
FORWARD_TOO = ("rope",)
"""Operations that are also measured without backward, as in published results."""


@dataclass(frozen=True)
class Training:
    """Measurements of training a model."""

    model: str
    rounds: int
    steps: int
    results: dict[str, Result]
    """Row of the table -> result."""
    matmul_flops_per_s: float
    """Rate of float32 products on one thread: the larger median of two measurements."""

    @property
    def flops_per_token(self) -> int:
        """6 N + 12 l h s, as in metrics.jsonl."""
        work = WORKLOADS[self.model]
        task = Task(work, tp=1, pp=1, dp=1, schedule="1f1b", kernels="auto", steps=1, rank=0, report=Path())
        return flops_per_token(train_config(task), work.vocab)

    def figures(self) -> dict[str, Any]:
        """Figures for the JSON file: speed, share of the matmul speed and peak memory."""
        trainers = {}
        for name, result in self.results.items():
            if result.wall_s:
                speed = WORKLOADS[self.model].tokens_per_step / wall(result)
                trainers[name] = {
                    "version": result.version,
                    "torch": result.torch,
                    "tokens_per_s": speed,
                    "of_matmul_speed": speed * self.flops_per_token / self.matmul_flops_per_s,
                    "peak_mib": peak(result),
                }
        return {
            "model": self.model,
            "rounds": self.rounds,
            "steps": self.steps,
            "matmul_gflops_per_s": self.matmul_flops_per_s / 1e9,
            "trainers": trainers,
        }


def kernels(*words: str) -> str:
    """Standard output of ``python -m trainer kernels WORDS``."""
    command = [sys.executable, "-m", "trainer", "kernels", *words]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def forward_words(document: dict[str, Any], device: str, for_bench: Sequence[str]) -> list[str]:
    """Arguments for a benchmark of FORWARD_TOO without backward; empty if not needed.

    Args:
        document: document of the first benchmark.
        device: one of its devices, which determines the sizes.
        for_bench: arguments of the first benchmark.
    """
    sizes: dict[str, dict[str, None]] = {}
    for row in document["measurements"]:
        if row["device"] == device:
            sizes.setdefault(row["operation"], {})[row["size"]] = None
    words = [f"{name}={','.join(sizes[name])}" for name in FORWARD_TOO if name in sizes]
    if not words or "--forward" in for_bench:
        return []
    # The last occurrence of a repeated flag counts.
    rest = [word for word in for_bench if word.partition("=")[0] not in sizes]
    return [*words, "--forward", *rest, "--device", device]


def measured(for_bench: Sequence[str]) -> dict[str, Any]:
    """The document of the bench, with measurements without backward in ``forward``."""
    document: dict[str, Any] = json.loads(kernels("bench", "--json", *for_bench))
    arguments = [forward_words(document, device, for_bench) for device in document["devices"]]
    forward = [json.loads(kernels("bench", "--json", *words))["measurements"] for words in arguments if words]
    return {**document, "forward": sum(forward, [])}


def matmul_flops_per_s() -> float:
    """Median rate of the product of two float32 matrices on one thread."""
    torch.set_num_threads(1)
    left, right = torch.rand(MATMUL_SIZE, MATMUL_SIZE), torch.rand(MATMUL_SIZE, MATMUL_SIZE)
    target = left @ right
    seconds = []
    for _ in range(MATMULS):
        began = time.perf_counter()
        torch.mm(left, right, out=target)
        seconds.append(time.perf_counter() - began)
    return 2 * MATMUL_SIZE**3 / statistics.median(seconds)


def train(flags: argparse.Namespace) -> Training:
    """Run all trainers in turn, with one process each."""
    before = matmul_flops_per_s()
    results: dict[str, dict[str, Result]] = {}
    for number in range(flags.rounds):
        measure(flags, number, results)
    return Training(flags.model, flags.rounds, flags.steps, results["1"], max(before, matmul_flops_per_s()))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def operations_report(document: dict[str, Any]) -> list[str]:
    """The document of the bench as Markdown."""
    allocator = ", ".join(f"{name}={value}" for name, value in document["allocator"].items()) or "glibc defaults"
    lines = [
        f"torch {document['torch']}, {document['compiler']}; {document['threads']} thread(s), median of "
        f"{document['repeats']} by {document['clock']}; {allocator}.",
        f"Times are of one call, {document['passes']} if there is one. GB/s count the minimum of bytes moved. plain is "
        "the code that users write in torch, reference our implementation in torch, small the function for sizes at "
        "which a kernel call costs more than it saves; * marks the choice of training at this size.",
    ]
    for device, name in document["devices"].items():
        if device == "cuda":
            name += f" (CUDA {document['cuda']}, driver {document['driver'] or 'unknown'})"
        rows = [row for row in document["measurements"] if row["device"] == device]
        speed = document["copy_gb_per_s"][device]
        lines += ["", f"## {device}: {name}, a copy moves {speed:.1f} GB/s", ""]
        lines += markdown(COLUMNS, [cells(row) for row in rows if not row["problem"]])
        lines += ["", *(f"- {line}" for line in problems(rows))]
        forward = [row for row in document["forward"] if row["device"] == device and not row["problem"]]
        if forward:
            lines += ["", "Forward only:", "", *markdown(COLUMNS, [cells(row) for row in forward])]
    return lines


def training_report(training: Training) -> list[str]:
    """Training results as Markdown, with the share of the processor's matmul speed."""
    work = WORKLOADS[training.model]
    versions = [f"- {name}: {r.version} (torch {r.torch})" for name, r in training.results.items() if r.version]
    truth = next((result for result in training.results.values() if result.wall_s), Result())
    shares = [
        (name, f"{found['tokens_per_s']:,.0f}", f"{found['of_matmul_speed']:.1%}")
        for name, found in training.figures()["trainers"].items()
    ]
    return [
        f"## Training {training.model}",
        "",
        f"{training.rounds} rounds of {training.steps} timed steps, one process with one thread. Float32 matrices of "
        f"{MATMUL_SIZE} x {MATMUL_SIZE} are multiplied at {training.matmul_flops_per_s / 1e9:.1f} GFLOP/s; a token "
        f"takes {training.flops_per_token / 1e6:.1f} MFLOP (6 N + 12 l h s).",
        "",
        *versions,
        "",
        *markdown(("trainer", "tokens/s", "of the matmul speed"), shares),
        "",
        *table(training.results, truth, work.tokens_per_step),
    ]


def report(day: datetime.date, document: dict[str, Any], training: Training | None, load: tuple[float, float]) -> str:
    """All measurements as Markdown."""
    lines = [
        f"# Fused kernels, {day}",
        "",
        f"{processor()}, {platform.platform()}; load average {load[0]:.1f} before and {load[1]:.1f} after.",
        *operations_report(document),
    ]
    if training is not None:
        lines += ["", *training_report(training)]
    return "\n".join(lines) + "\n"


def store(folder: Path, day: datetime.date, document: dict[str, Any], training: Training | None, text: str) -> None:
    """Write Markdown and JSON files, one pair per day and kinds of device."""
    folder.mkdir(exist_ok=True)
    name = f"kernels-{'-'.join(document['devices'])}-{day}"
    stored = {"date": str(day), **document, "training": None if training is None else training.figures()}
    (folder / f"{name}.json").write_text(f"{json.dumps(stored, indent=1)}\n")
    (folder / f"{name}.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--end-to-end", action="store_true", help="also train, with and without kernels and with peers")
    parser.add_argument("--model", choices=WORKLOADS, default="small")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=[*COMPARED, OURS_REFERENCE, PLAIN_GLIBC])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per run")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the timed ones")
    parser.add_argument("--write", action="store_true", help="also write .md and .json to benchmarks/results")
    flags, for_bench = parser.parse_known_args()
    flags.layouts = ["1"]
    before = os.getloadavg()[0]
    print(kernels("build"), file=sys.stderr)
    document = measured(for_bench)
    training = train(flags) if flags.end_to_end else None
    day = datetime.datetime.now(datetime.timezone.utc).date()
    text = report(day, document, training, (before, os.getloadavg()[0]))
    if flags.write:
        store(RESULTS, day, document, training, text)
    print(text)


if __name__ == "__main__":
    main()
