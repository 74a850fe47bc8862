"""Handmade runs for pages, as hostile as their names and logs may be."""

import json
from dataclasses import replace
from pathlib import Path

import yaml

from llmctl.context import Context
from llmctl.runs.index import IndexEntry
from tests.llmctl.run_directories import TRANSPORT, MadeRun, beat, fail, make_run

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;\"'{{ 7 * 7 }}"
CONFIG = Path(__file__).parents[4] / "examples/gpt_small.yaml"
BEGAN = 1_764_000_000.0


def add(context: Context, run: MadeRun) -> IndexEntry:
    """Put a run into the index of a user."""
    context.index.add(run.record)
    return context.index.find(run.record.run_id)


def made_run(root: Path, run_id: str = "demo-261127-120000-abcd", *, name: str = "demo", **changes: object) -> MadeRun:
    """A run of the bundled example over two pipeline ranks, without attempts."""
    run = make_run(root, run_id)
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["parallel"] = {"pipeline_model_parallel_size": 2}
    config["training"]["global_batch_size"] = 16
    job = {"nodes": 2, "gpus_per_node": 1, "env": {}, "secrets": []}
    record = replace(run.record, name=name, config=config, job=job, origins={"optimizer.lr": "--set"})
    run.record = replace(record, **changes)
    run.record.save(TRANSPORT)
    return run


def trained(run: MadeRun, *, steps: int = 40, resumes_at: int | None = None, loss: float = 3.0) -> MadeRun:
    """Rows, attempts and ends of a training; with ``resumes_at``, its first attempt failed and went back there."""
    run.submit(None)
    rows = [(1, step) for step in range(1, steps + 1)]
    if resumes_at is not None:
        failed = steps - 5
        rows = [(1, step) for step in range(1, failed)] + [(2, step) for step in range(resumes_at, steps + 1)]
    with (run.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for count, (attempt, step) in enumerate(rows):
            file.write(json.dumps(row(step, attempt, BEGAN + 20 + count + 50 * (attempt - 1), loss)) + "\n")
        file.write(json.dumps({"attempt": 1, "iteration": steps, "valid_loss": loss + 0.1, "valid_ppl": 20.0}) + "\n")
    for attempt in sorted({attempt for attempt, _ in rows}):
        of_attempt = [count for count, one in enumerate(rows) if one[0] == attempt]
        begins, ends = (BEGAN + 20 + count + 50 * (attempt - 1) for count in (of_attempt[0], of_attempt[-1]))
        folder = run.start_attempt(attempt, host="node7", time=begins - 10)
        is_last = attempt == rows[-1][0]
        ending = {"code": 0 if is_last else 1, "reason": "completed" if is_last else "failed", "time": ends + 3}
        (folder / "exit.json").write_text(json.dumps(ending))
        for rank, peak in enumerate((600 << 20, 480 << 20)):
            beat(folder, rank, age_s=0, host="node7", peak_memory_bytes=peak)
        if not is_last:
            fail(folder, 1, "the GPU fell off the bus", age_s=0, host="node7")
            (folder / "rank-00001.log").write_text("1/40 loss 5.5\nthe GPU fell off the bus\n")
    return run


def row(step: int, attempt: int, time: float, loss: float) -> dict[str, float]:
    """One row of training."""
    return {
        "attempt": attempt,
        "iteration": step,
        "consumed_tokens": 4096 * step,
        "lm_loss": loss + 8 / step,
        "grad_norm": 1.0 + 1 / step,
        "learning_rate": 1e-3,
        "iteration_time_s": 1.0,
        "tokens_per_s": 4096.0,
        "mfu": None,
        "peak_memory_bytes": 600 << 20,
        "time": time,
        "fencing_token": attempt,
    }
