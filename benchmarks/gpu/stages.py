"""Proofs and measurements on one GPU: stages with limits, written down as they end.

    python -m benchmarks.gpu.stages [--out DIR] [--seconds 500] [STAGE...]
    python -m benchmarks.gpu.stages --dry       # every stage at toy size on the CPU

Each stage is a process of its own. When it ends, what it printed as JSON is appended to results.jsonl, its whole output
to log.txt, and summary.md is written again, so that a visit that is cut off keeps what was done. A stage that
results.jsonl already has as done is skipped: the next visit goes on. Exit code 1 if a stage failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYTHON = sys.executable


@dataclass(frozen=True)
class Stage:
    """One process of a visit.

    Attributes:
        argv: command on a GPU.
        dry: command on the CPU; None: the stage has no meaning there.
        limit_s: time after which it is killed.
    """

    name: str
    argv: tuple[str, ...]
    dry: tuple[str, ...] | None
    limit_s: int


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """Command of a Python module."""
    return (PYTHON, "-m", name, *arguments)


def speed(trainer: str, model: str, micro_batches: int, limit_s: int) -> Stage:
    """Stage of benchmarks.gpu.speed."""
    name = "benchmarks.gpu.speed"
    measured = module(name, trainer, model, "--micro-batches", str(micro_batches))
    dry = module(name, trainer, "toy", "--micro-batches", "2", "--device", "cpu")
    return Stage(f"{model}-{trainer}", measured, dry, limit_s)


STAGES = (
    Stage(
        "build",
        module("trainer", "kernels", "build"),
        module("trainer", "kernels", "build"),
        150,
    ),
    Stage(
        "training-run",
        module("benchmarks.gpu.training_run"),
        module("benchmarks.gpu.training_run", "--device", "cpu"),
        150,
    ),
    speed("ours", "1b", 8, 90),
    Stage(
        "ceilings",
        module("benchmarks.gpu.ceilings"),
        module("benchmarks.gpu.ceilings", "--device", "cpu", "--models", "toy"),
        90,
    ),
    Stage(
        "tests",
        module("pytest", "-m", "gpu", "-n", "8", "--maxfail", "40", "-p", "no:cacheprovider", "tests/trainer"),
        None,
        240,
    ),
    speed("plain", "1b", 8, 150),
    speed("ours", "345m", 1, 60),
    speed("plain", "345m", 1, 100),
    Stage(
        "parity",
        module("tests.parity", "--few", "--device", "cuda", "--shard", "1/12"),
        None,
        100,
    ),
    Stage(
        "profile-1b",
        module("benchmarks.gpu.profile", "1b"),
        module("benchmarks.gpu.profile", "toy", "--device", "cpu"),
        80,
    ),
    Stage(
        "kernels",
        module("benchmarks.kernels", "--device", "cuda", "--json"),
        module("benchmarks.kernels", "--device", "cpu", "--tiny", "--json"),
        150,
    ),
    speed("ours-reference", "1b", 8, 90),
    speed("ours", "3b", 8, 120),
    speed("plain", "3b", 8, 180),
    speed("transformers", "1b", 8, 180),
    speed("ours", "8b", 8, 150),
)


class Results:
    """results.jsonl, log.txt and summary.md of a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows, self.log, self.summary = folder / "results.jsonl", folder / "log.txt", folder / "summary.md"

    def read(self) -> list[dict[str, Any]]:
        """All rows so far."""
        return [json.loads(line) for line in self.rows.read_text().splitlines()] if self.rows.exists() else []

    def done(self) -> set[str]:
        """Names of the stages that ended well."""
        return {row["stage"] for row in self.read() if row.get("exit") == 0}

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, durably."""
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_summary(self) -> str:
        """Write summary.md again, and return it."""
        text = summary(self.read())
        self.summary.write_text(text)
        return text


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The stages, and the speed of each trainer, as Markdown."""
    lines = ["| stage | exit code | s | end of the output |", "|---|---|---|---|"]
    lines += [f"| {r['stage']} | {r['exit']} | {r['wall_s']:.0f} | {r['end']} |" for r in rows if "exit" in r]
    lines += ["", "| model | trainer | tokens/s | TFLOP/s | MFU full / causal | GiB |", "|---|---|---|---|---|---|"]
    for row in (row["item"] for row in rows if "tokens_per_s" in row.get("item", {})):
        mfu = f"{row['mfu_full']:.1%} / {row['mfu_causal']:.1%}" if row["mfu_full"] else "-"
        what = f"{row['model']}, {row['micro_batches']} x {row['micro_batch']} x {row['sequence']}"
        numbers = f"{row['tokens_per_s']:,.0f} | {row['tflops']:.1f} | {mfu} | {row['peak_gib']:.1f}"
        lines.append(f"| {what} | {row['trainer']} | {numbers} |")
    return "\n".join(lines) + "\n"


def run(stage: Stage, argv: Sequence[str], limit_s: float, results: Results) -> int:
    """Run a stage, and write down what it printed. Returns its exit code; 124 at the limit."""
    start = time.monotonic()
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        code = 124
    except BaseException:
        # Ctrl-C does not reach the stage's session.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    text, told = output.decode(errors="replace"), errors.decode(errors="replace")
    with results.log.open("a") as file:
        file.write(f"\n===== {stage.name}: exit {code}\n{text}\n----- stderr\n{told}\n")
    for item in items_of(text):
        results.add({"stage": stage.name, "item": item})
    last = [line.strip() for line in (told if code else text).splitlines() if line.strip()][-1:] or [""]
    end = "" if last[0].startswith(("{", "}")) else last[0].replace("|", "/")[:160]
    results.add({"stage": stage.name, "exit": code, "wall_s": time.monotonic() - start, "end": end})
    return code


def items_of(text: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects, or the whole text as one object."""
    try:
        whole = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    return [whole] if isinstance(whole, dict) else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: {' '.join(s.name for s in STAGES)}")
    parser.add_argument("--out", type=Path, help="folder of the results; default: $OUT, or build/gpu or build/gpu-dry")
    parser.add_argument("--seconds", type=float, default=500, help="start no stage after this time, and end the last")
    parser.add_argument("--dry", action="store_true", help="toy shapes on the CPU")
    flags = parser.parse_args()
    names = [stage.name for stage in STAGES]
    unknown = [name for name in flags.stages if name not in names]
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)}; choose from {', '.join(names)}")
    # Apart: a stage that is done at toy size is not done on the GPU.
    results = Results(flags.out or Path(os.environ.get("OUT") or ("build/gpu-dry" if flags.dry else "build/gpu")))
    left = time.monotonic() + flags.seconds
    failed = []
    for name in flags.stages or names:
        stage = STAGES[names.index(name)]
        argv = stage.dry if flags.dry else stage.argv
        if argv is None or name in results.done():
            continue
        limit_s = min(stage.limit_s, left - time.monotonic())
        if limit_s < 10:
            print(f"no time left for {name}", flush=True)
            continue
        code = run(stage, argv, limit_s, results)
        print(f"{name}: exit {code}", flush=True)
        if code:
            failed.append(name)
        results.write_summary()
    print(results.write_summary())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
