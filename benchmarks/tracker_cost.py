"""Cost of each tracker on the training thread, beside no tracker.

    python -m benchmarks.tracker_cost [--steps 300] [--step-ms 100] [--layers 0] [--write]

Each step computes for about --step-ms on this thread, then hands over its row as the loop does. ``hand over`` is the
time of that call on the processor. ``beside`` is the processor time of all other threads of this process: the tracker's
work, which takes turns with Python code of the training, so that a step whose Python never waits for the device gets
longer by at most as much. ``step`` is the wall time of a step, which other load changes. The trackers take turns within
a round. MLflow writes a store of files, Weights & Biases an offline run: the network is not measured.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from trainer.config.sections.logging import LoggingConfig
from trainer.process.heartbeat import Heartbeat
from trainer.trackers.protocol import RunFacts
from trainer.trackers.tracking import Tracking

RESULTS = Path(__file__).parent / "results"
GOAL_SHARE = 0.005
SIZE = 384


def configs(folder: Path) -> dict[str, LoggingConfig]:
    """Tracker -> config that asks for it alone."""
    wandb = {"wandb_project": "p", "wandb_mode": "offline", "wandb_save_dir": str(folder)}
    mlflow = {"mlflow_tracking_uri": f"file:{folder / 'mlflow'}"}
    return {
        "none": LoggingConfig(),
        "TensorBoard": LoggingConfig(tensorboard_dir=str(folder / "events")),
        "Weights & Biases, offline": LoggingConfig(**wandb),
        "MLflow, files": LoggingConfig(**mlflow),
        "one of its own that does nothing": LoggingConfig(trackers=["benchmarks.tracker_cost:Nothing"]),
    }


class Nothing:
    """A tracker that drops everything."""

    def begin(self, facts: RunFacts) -> None:
        """Nothing."""

    def log(self, iteration: int, scalars: object) -> None:
        """Nothing."""

    def end(self, outcome: str) -> None:
        """Nothing."""


def row(iteration: int, layers: int) -> dict[str, object]:
    """A row with all numbers of a training row, and norms of some layers."""
    values: dict[str, object] = dict.fromkeys(("lm_loss", "grad_norm", "learning_rate", "loss_scale"), 0.1)
    values |= dict.fromkeys(("iteration_time_s", "tokens_per_s", "tflops_per_device", "mfu", "time"), 0.2)
    values |= dict.fromkeys(("consumed_tokens", "peak_memory_bytes", "skipped_iterations", "nan_iterations"), 12345)
    if layers:
        norms = {f"layers.{number}": 0.5 for number in range(layers)}
        values |= {"layer_grad_norms": norms, "layer_params_norms": norms}
    return {**values, "iteration": iteration, "attempt": 1}


def measure(config: LoggingConfig, run_id: str, steps: int, step_s: float, layers: int) -> dict[str, list[float]]:
    """Seconds of every step: in handing over, and in all; and those of other threads, as a mean."""
    matrix = torch.ones(SIZE, SIZE)
    found: dict[str, list[float]] = {"hand over": [], "step": []}
    with Tracking(Heartbeat(None, 0)) as tracking:
        tracking.choose(config)
        tracking.begin(RunFacts(run_id, run_id))
        # Imports and the start of the tracker are no cost of a step.
        for thread in tracking._threads:
            while thread._has_begun is None:
                time.sleep(0.01)
        products = products_in(matrix, step_s)
        process, own = time.process_time(), time.thread_time()
        for iteration in range(1, steps + 1):
            values = row(iteration, layers)
            began = time.perf_counter()
            for _ in range(products):
                torch.mm(matrix, matrix)
            computed = time.thread_time()
            tracking.log(values, iteration * 8, 8)
            found["hand over"].append(time.thread_time() - computed)
            found["step"].append(time.perf_counter() - began)
        others = time.process_time() - process - (time.thread_time() - own)
        tracking.outcome = "completed"
    return {**found, "beside": [others / steps]}


def products_in(matrix: torch.Tensor, seconds: float) -> int:
    """Number of matrix products in a time on this thread."""
    began, count = time.thread_time(), 0
    while time.thread_time() - began < max(0.2, seconds):
        torch.mm(matrix, matrix)
        count += 1
    return max(1, round(count * seconds / (time.thread_time() - began)))


def main() -> int:
    """Measure and print; 1 if a tracker costs the training thread more than the goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0, help="layers whose norms are in every row")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    options = parser.parse_args()
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_SILENT": "true"}
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, list[float]]]] = {}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for name, config in configs(Path(folder)).items():
                values = measure(config, f"run-{number}", options.steps, options.step_ms / 1000, options.layers)
                found.setdefault(name, []).append(values)
                print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
    table, is_good = report(found, options)
    print(table)
    if options.write:
        (RESULTS / f"tracker_cost-{datetime.date.today()}.md").write_text(table + "\n", encoding="utf-8")
    return 0 if is_good else 1


def report(found: dict[str, list[dict[str, list[float]]]], options: argparse.Namespace) -> tuple[str, bool]:
    """The table in milliseconds, and whether every tracker keeps the goal."""
    lines = [
        f"{processor()}, 1 thread, {datetime.date.today()}, torch {torch.__version__}; medians of {options.rounds} x "
        f"{options.steps} steps of {options.step_ms:g} ms, rows with the norms of {options.layers} layers:",
        "",
        "| tracker | hand over, ms | of a step | beside, ms | step, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    is_good = True
    for name, rounds in found.items():
        handing, beside, step = (
            1000 * statistics.median(value for each in rounds for value in each[part])
            for part in ("hand over", "beside", "step")
        )
        is_good = is_good and handing < GOAL_SHARE * options.step_ms
        lines.append(f"| {name} | {handing:.3f} | {handing / options.step_ms:.3%} | {beside:.2f} | {step:.1f} |")
    return "\n".join(lines), is_good


def processor() -> str:
    """Name of the processor."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} x {line.partition(':')[2].strip()}"
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
