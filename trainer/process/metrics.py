"""Rows of metrics.jsonl and lines of the console. Torch-free.

tokens_per_s counts every position of the global batch; tflops_per_device and mfu follow trainer.planning.flops.
skipped_iterations and nan_iterations count from the start of the run. Non-finite numbers become null.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.records.json_text import json_text
from trainer.process.progress import TrainingProgress
from trainer.process.run_lock import LostLockError, RunLock


@dataclass(frozen=True)
class SpeedScale:
    """Constants that convert a time per iteration into speeds.

    Attributes:
        tokens_per_iteration: mean number of positions in the global batches.
        flops_per_token: model FLOPs per token, see trainer.planning.flops.
        devices: number of ranks of the job.
        peak_tflops: peak speed of one device in TFLOP/s; None: unknown, so no MFU is reported.
    """

    tokens_per_iteration: float
    flops_per_token: int
    devices: int
    peak_tflops: float | None

    def tokens_per_s(self, iteration_time_s: float) -> float:
        """Tokens per second of the whole job."""
        return self.tokens_per_iteration / iteration_time_s

    def tflops_per_device(self, iteration_time_s: float) -> float:
        """Model TFLOP/s of one device."""
        return self.tokens_per_s(iteration_time_s) * self.flops_per_token / self.devices / 1e12

    def mfu(self, iteration_time_s: float) -> float | None:
        """Model FLOPs utilisation: achieved model TFLOP/s as a share of the peak.

        None if the peak is unknown.
        """
        return None if self.peak_tflops is None else self.tflops_per_device(iteration_time_s) / self.peak_tflops


def training_row(
    attempt: int,
    progress: TrainingProgress,
    speed: SpeedScale,
    *,
    grad_norm: float | None,
    learning_rate: float,
    loss_scale: float,
    iteration_time_s: float,
    peak_memory_bytes: int,
) -> dict[str, Any]:
    """Build the row of a logged iteration.

    Loss and time are means over the iterations since the last logged one; all other values are those of this one.
    """
    has_loss = progress.interval_tokens > 0
    return {
        "attempt": attempt,
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "lm_loss": progress.interval_loss / progress.interval_tokens if has_loss else None,
        **{name: total / count for name, (total, count) in progress.further_losses.items() if count},
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "loss_scale": loss_scale,
        "iteration_time_s": iteration_time_s,
        "tokens_per_s": speed.tokens_per_s(iteration_time_s),
        "tflops_per_device": speed.tflops_per_device(iteration_time_s),
        "mfu": speed.mfu(iteration_time_s),
        "peak_memory_bytes": peak_memory_bytes,
        "skipped_iterations": progress.skipped_iterations,
        "nan_iterations": progress.nan_iterations,
        "time": time.time(),
    }


def validation_row(
    attempt: int, iteration: int, loss: float | None, further: Mapping[str, float | None] | None = None
) -> dict[str, Any]:
    """Build the row of an evaluation: mean loss per valid token and perplexity, and ``further`` terms of the loss.

    Both are None without valid tokens.
    """
    return {
        "attempt": attempt,
        "iteration": iteration,
        "valid_loss": loss,
        "valid_ppl": None if loss is None else perplexity(loss),
        **{f"valid_{name}": mean for name, mean in (further or {}).items()},
        "time": time.time(),
    }


def tasks_row(attempt: int, iteration: int, metrics: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Build the row of an evaluation of tasks: task -> metric -> value; a value that is not finite is None."""
    finite = {
        task: {name: value if math.isfinite(value) else None for name, value in values.items()}
        for task, values in metrics.items()
    }
    return {"attempt": attempt, "iteration": iteration, "tasks": finite, "time": time.time()}


def missed_row(attempt: int, iteration: int, problem: str) -> dict[str, Any]:
    """Build the row of a checkpoint that the disk refused."""
    return {"attempt": attempt, "iteration": iteration, "missed_save": problem, "time": time.time()}


def spike_row(attempt: int, iteration: int, loss: float, median: float) -> dict[str, Any]:
    """Build the row of a step whose loss is far above the ``median`` of those before it."""
    return {"attempt": attempt, "iteration": iteration, "loss_spike": loss, "loss_before": median, "time": time.time()}


def saved_row(
    attempt: int, iteration: int, size: int, *, stage_s: float, wait_s: float, drain_s: float
) -> dict[str, Any]:
    """Build the row of a complete checkpoint of ``size`` bytes. For ``stage_s`` + ``wait_s`` the training stood."""
    return {
        "attempt": attempt,
        "iteration": iteration,
        "save_bytes": size,
        "save_stage_s": stage_s,
        "save_wait_s": wait_s,
        "save_drain_s": drain_s,
        "time": time.time(),
    }


def copied_row(
    attempt: int, iteration: int, size: int, *, stage_s: float, wait_s: float, drain_s: float
) -> dict[str, Any]:
    """Build the row of a copy of the state, of ``size`` bytes over all ranks; see saved_row."""
    return {
        "attempt": attempt,
        "iteration": iteration,
        "copy_bytes": size,
        "copy_stage_s": stage_s,
        "copy_wait_s": wait_s,
        "copy_drain_s": drain_s,
        "time": time.time(),
    }


def perplexity(loss: float) -> float:
    """Exponential of the mean loss per token; infinite if it overflows a float."""
    return math.exp(loss) if loss < 700.0 else math.inf


def training_line(row: Mapping[str, Any], train_iters: int) -> str:
    """Console line of a training row, of at most 80 columns for runs without trouble; the row has more."""
    left_s = (train_iters - row["iteration"]) * row["iteration_time_s"]
    parts = [
        f"{row['iteration']}/{train_iters}",
        f"loss {_number(row['lm_loss'], '.4f')}",
        *_further_losses(row),
        f"grad {_number(row['grad_norm'], '.3f')}",
        f"{row['tokens_per_s']:,.0f} tok/s",
    ]
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    if row["skipped_iterations"]:
        scale = f"loss scale {row['loss_scale']:g}, " if row["loss_scale"] != 1.0 else ""
        parts.append(f"{scale}{row['skipped_iterations']} skipped")
    if row["nan_iterations"]:
        parts.append(f"{row['nan_iterations']} not finite")
    return "  ".join([*parts, f"ETA {_clock(left_s)}"])


def validation_line(row: Mapping[str, Any], train_iters: int) -> str:
    """Console line of a validation row."""
    return (
        f"{row['iteration']}/{train_iters}  validation loss {_number(row['valid_loss'], '.4f')}  "
        f"perplexity {_number(row['valid_ppl'], '.2f')}" + "".join(f"  {part}" for part in _further_losses(row))
    )


# Auxiliary losses of layers with experts are left to the rows: with them a line would pass 80 columns.
_NOT_IN_LINES = ("lm_loss", "valid_loss", "load_balancing_loss", "z_loss")


def _further_losses(row: Mapping[str, Any]) -> list[str]:
    """Words for the losses besides that of the next token."""
    names = [key for key in row if key.endswith("_loss") and key not in _NOT_IN_LINES]
    return [f"{name.replace('_', ' ')} {_number(row[name], '.4f')}" for name in names]


def tasks_line(row: Mapping[str, Any], train_iters: int) -> str:
    """Console line of a row of tasks."""
    metrics = [(f"{task} {name}", value) for task, found in row["tasks"].items() for name, value in found.items()]
    values = [f"{name} {_number(value, '.4f')}" for name, value in metrics]
    return "  ".join([f"{row['iteration']}/{train_iters}", *values])


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class MetricsFile:
    """Appends rows to a file atomically, each with the fencing token of the run's lock."""

    def __init__(self, path: Path, lock: RunLock | None = None) -> None:
        """Open ``path`` for appending, and remove an incomplete last line.

        Raises:
            OSError: the file cannot be written.
        """
        self._lock = lock
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.ftruncate(self._descriptor, content.rfind(b"\n") + 1)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row with a single call, so that rows never mix. A full disk or a lost lock loses the row.

        The loop reads from the lock that it is lost, since all ranks must end together.
        """
        token = {} if self._lock is None else {"fencing_token": self._lock.token}
        line = (json_text({**row, **token}) + "\n").encode()
        with suppress(OSError, LostLockError):
            if self._lock is not None:
                self._lock.check()
            written = os.write(self._descriptor, line)
            if written < len(line):
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
