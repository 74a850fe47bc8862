"""Wall and CPU time of ``llmctl report`` over ten runs of 100,000 rows each, and the size of its page.

    python -m benchmarks.report_page --write

The limits are 5 s and 5 MB on two cores. Other processes on the machine lengthen the wall time: the table has the
shortest of several reports, the load of the machine, and the priority of the session, which root can raise
(``echo -15 > /proc/self/autogroup``, sched(7)).
"""

import argparse
import datetime
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cli_start import clean_environment
from llmctl.runs.index import RunIndex
from llmctl.runs.record import RunRecord, Submission
from llmctl.transport.local import LocalTransport

MOST_S, MOST_MB = 5.0, 5.0
BEGAN = 1_764_000_000.0


def write_rows(path: Path, count: int, seed: int) -> None:
    """Rows as the trainer writes them: the same keys, and numbers of full length."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, count + 1):
            took = 0.25 + draw.random() / 100
            row = {
                "attempt": 1,
                "iteration": step,
                "consumed_samples": 32 * step,
                "consumed_tokens": 65536 * step,
                "lm_loss": 3 + 8 * math.exp(-step / 5000) + draw.gauss(0, 0.05),
                "grad_norm": draw.lognormvariate(0, 0.3),
                "learning_rate": 3e-4 * math.cos(step / count),
                "loss_scale": 1.0,
                "iteration_time_s": took,
                "tokens_per_s": 65536 / took,
                "tflops_per_device": 123 + draw.random(),
                "mfu": 0.4 + draw.random() / 100,
                "peak_memory_bytes": 40_123_456_789,
                "skipped_iterations": 0,
                "nan_iterations": 0,
                "time": BEGAN + 0.25 * step + draw.random() / 1000,
                "fencing_token": 1,
            }
            file.write(json.dumps(row) + "\n")


def make_runs(home: Path, runs: int, rows: int) -> list[str]:
    """Runs in the index of a user, and their ids."""
    index, names = RunIndex(home / ".local/state/llmctl"), []
    for number in range(runs):
        run_dir = home / f"llmctl-runs/run{number}"
        (run_dir / "attempts/1").mkdir(parents=True)
        write_rows(run_dir / "metrics.jsonl", rows, number)
        started = {"attempt": 1, "submission": 1, "host": "node1", "time": BEGAN}
        ended = {"code": 0, "reason": "completed", "time": BEGAN + 0.25 * rows + 5}
        for name, values in (("started", started), ("exit", ended)):
            (run_dir / f"attempts/1/{name}.json").write_text(json.dumps(values))
        record = RunRecord(
            run_id=run_dir.name,
            name=run_dir.name,
            created=BEGAN - 60,
            llmctl_version="benchmark",
            cluster="local",
            run_dir=run_dir,
            command=("llmctl", "submit"),
            job={"nodes": 1},
            config={"training": {"train_iters": rows}},
            origins={},
            code={},
            submissions=(Submission(1, BEGAN - 60),),
        )
        record.save(LocalTransport({}))
        index.add(record)
        names.append(record.run_id)
    return names


def measured(home: Path, names: list[str]) -> tuple[float, float, float]:
    """Wall and CPU time of one report in seconds, and the megabytes of its page."""
    words = [sys.executable, "-m", "llmctl", "report", *names, "--output", "page.html"]
    begin, before = time.perf_counter(), os.times()
    subprocess.run(words, cwd=home, env=clean_environment(str(home)), check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - begin, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used, (home / "page.html").stat().st_size / 1e6


def priority() -> str:
    """Niceness of the session against other sessions, as the kernel says it."""
    group = Path("/proc/self/autogroup")
    return group.read_text().partition(" ")[2].strip() if group.exists() else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="also write the table to benchmarks/results")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = make_runs(Path(folder), flags.runs, flags.rows)
        input_mb = sum(path.stat().st_size for path in Path(folder).rglob("metrics.jsonl")) / 1e6
        load = os.getloadavg()[0]
        found = [measured(Path(folder), names) for _ in range(flags.repeats)]
    wall, used, size = min(found)
    walls = ", ".join(f"{one:.2f}" for one, _, _ in found)
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"# llmctl report: {flags.runs} runs of {flags.rows:,} rows",
        "",
        f"{datetime.date.today()}, Python {platform.python_version()}, {cores} cores; load of others {load:.1f}, "
        f"priority of the session: {priority()}.",
        f"`python -m benchmarks.report_page`, {flags.repeats} reports: {walls} s of wall time.",
        "",
        "| measure | found | limit |",
        "|---|---|---|",
        f"| metrics read, MB | {input_mb:.0f} | |",
        f"| wall time, s | {wall:.2f} | {MOST_S} |",
        f"| CPU time, s | {used:.2f} | |",
        f"| page, MB | {size:.2f} | {MOST_MB} |",
    ]
    print("\n".join(lines))
    if flags.write:
        target = Path(__file__).parent / f"results/report_page-{datetime.date.today()}.md"
        target.write_text("\n".join([*lines, ""]), encoding="utf-8")
    if wall > MOST_S or size > MOST_MB:
        raise SystemExit("a limit is exceeded")


if __name__ == "__main__":
    main()
