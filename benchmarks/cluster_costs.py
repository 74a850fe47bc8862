"""CPU time and scheduler calls of llmctl, TorchX and NeMo-Run on a cluster.

    benchmarks/peers/set_up.sh
    python -m benchmarks.cluster_costs --write

The scheduler is a stub: scripts named sbatch, squeue and sacct that log every call and always report a running job. All
programs use the same stub, one after the other. CPU time (user + system) is robust against other load on the machine.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cli_start import clean_environment, cpu_ms
from llmctl.backends import load_queue_backend
from llmctl.backends.base import SubmittedJob
from llmctl.runs.index import RunIndex
from llmctl.runs.record import RunRecord, Submission
from llmctl.transport.local import LocalTransport

RANKS = 64
NODES = 8
JOB_ID = "4242"
PEERS = Path("~/.cache/llmctl-benchmarks").expanduser()
NEMO_DRY_RUN = """
import sys
import nemo_run as run
executor = run.SlurmExecutor(account="a", partition="gpu", nodes=int(sys.argv[1]), ntasks_per_node=8, gpus_per_node=8,
                             time="01:00:00", tunnel=run.LocalTunnel(job_dir=sys.argv[2]), packager=run.Packager())
with run.Experiment("x") as experiment:
    experiment.add(run.Script(inline="python train.py"), executor=executor, name="t")
    if sys.argv[3] == "dry":
        experiment.dryrun()
    else:
        experiment.run(detach=True)
if sys.argv[3] == "follow":
    experiment.logs("t")
"""


@dataclass(frozen=True)
class Site:
    """A home folder, a folder of runs, and a stub scheduler with counted calls."""

    home: Path

    @property
    def calls(self) -> Path:
        """Log file with one word per call."""
        return self.home / "calls"

    def environment(self) -> dict[str, str]:
        """Environment with the stub's commands first on PATH."""
        clean = clean_environment(str(self.home))
        return clean | {"PATH": f"{self.home / 'bin'}:{clean['PATH']}"}

    def count(self) -> Counter[str]:
        """Count the calls of each command since the last count."""
        lines = self.calls.read_text().split() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return Counter(lines)

    def stand_in(self, name: str, answer: str) -> None:
        """Write a stub command that logs its call and prints ``answer``."""
        path = self.home / "bin" / name
        path.parent.mkdir(exist_ok=True)
        answer_file = path.with_name(f".{name}")
        answer_file.write_text(answer)
        path.write_text(f"#!/bin/sh\necho {name} >>{self.calls}\nexec cat {answer_file}\n")
        path.chmod(0o755)


def make_runs(site: Site, count: int) -> list[RunRecord]:
    """Make ``count`` running runs of the ``slurm`` profile, with the files of their jobs."""
    overlay = site.home / ".config/llmctl/clusters/slurm.yaml"
    overlay.parent.mkdir(parents=True)
    overlay.write_text(f"runs_root: {site.home}/runs\n")
    transport = LocalTransport(site.environment())
    index = RunIndex(site.home / ".local/state/llmctl")
    now = time.time()
    records = []
    for number in range(count):
        run_id = f"bench-261121-{number:06d}-abcd"
        run_dir = site.home / "runs" / run_id
        job = SubmittedJob("login", str(int(JOB_ID) + number))
        record = RunRecord(
            run_id=run_id,
            name="bench",
            created=now,
            llmctl_version="0",
            cluster="slurm",
            run_dir=run_dir,
            command=("llmctl",),
            job={"name": "bench", "nodes": NODES},
            config={"training": {"train_iters": 1000}},
            origins={},
            code={"trainer": None},
            submissions=(Submission(1, now, (job,)),),
        )
        attempt = run_dir / "attempts/1"
        (attempt / "heartbeat").mkdir(parents=True)
        started = {"attempt": 1, "submission": 1, "job_id": job.job_id, "host": "n1", "time": now}
        (attempt / "started.json").write_text(json.dumps(started))
        row = {"attempt": 1, "iteration": 5, "lm_loss": 4.2, "tokens_per_s": 1e5, "iteration_time_s": 1.0, "time": now}
        (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        record.save(transport)
        index.add(record)
        records.append(record)
    backend = load_queue_backend("slurm")
    assert backend
    site.stand_in("squeue", "".join(running_line(record, backend.job_name(record.run_id)) for record in records))
    return records


def running_line(record: RunRecord, job_name: str) -> str:
    """Line of squeue for a run's job, in the format of the slurm backend."""
    return f"{record.submissions[-1].jobs[0].job_id}|RUNNING|2026-11-21T12:00:00|n[1-{NODES}]|None|{job_name}\n"


def cpu_of_dry_run(site: Site, runs: int) -> list[str]:
    """Table of CPU times of a dry run with 8 and 512 nodes."""
    llmctl = str(Path(sys.executable).with_name("llmctl"))
    script = site.home / "train.py"
    script.write_text("print(1)\n")
    nemo = site.home / "nemo.py"
    nemo.write_text(NEMO_DRY_RUN)
    torchx = [
        str(PEERS / "torchx/bin/torchx"),
        "run",
        "--dryrun",
        "-s",
        "slurm",
        "-cfg",
        "partition=gpu",
    ]
    lines = ["| command | 8 nodes | 512 nodes |", "|---|---|---|"]
    commands: dict[str, list[list[str]]] = {
        "llmctl submit --cluster slurm --dry-run": [
            [
                llmctl,
                "submit",
                "--dry-run",
                "--cluster",
                "slurm",
                "--nodes",
                nodes,
                "--gpus-per-node",
                "8",
                "--",
                "python",
                "train.py",
            ]
            for nodes in ("8", "512")
        ],
        "torchx run --dryrun -s slurm": [
            [*torchx, "dist.ddp", "-j", f"{nodes}x8", "--script", str(script)] for nodes in ("8", "512")
        ],
        "NeMo-Run Experiment.dryrun": [
            [str(PEERS / "nemo-run/bin/python"), str(nemo), nodes, str(site.home), "dry"] for nodes in ("8", "512")
        ],
    }
    times: dict[str, list[list[float]]] = {name: [[], []] for name in commands}
    for number in range(runs + 1):
        for name, sizes in commands.items():
            for place, argv in enumerate(sizes):
                took = cpu_ms(argv, str(site.home))
                if number:  # The first round fills the bytecode caches.
                    times[name][place].append(took)
    for name, sizes in times.items():
        lines.append(f"| {name} | {statistics.median(sizes[0]):.0f} | {statistics.median(sizes[1]):.0f} |")
    return lines


def cost_of_status(site: Site, count: int) -> list[str]:
    """Table of CPU time and scheduler calls for the status of many runs."""
    llmctl = str(Path(sys.executable).with_name("llmctl"))
    ours = [cpu_ms([llmctl, "status", "--all", "--json"], str(site.home), site.environment()) for _ in range(3)]
    calls = site.count()
    peers = [
        cpu_ms(
            [str(PEERS / "torchx/bin/torchx"), "status", f"slurm://torchx/{JOB_ID}"], str(site.home), site.environment()
        )
        for _ in range(3)
    ]
    theirs = site.count()
    return [
        f"| | scheduler calls for {count} runs | CPU seconds |",
        "|---|---|---|",
        f"| llmctl status --all | {sum(calls.values()) / 3:.0f} ({shown(calls, 3)}) "
        f"| {statistics.median(ours) / 1000:.2f} |",
        f"| torchx status, once per run (measured on one, times {count}) | {sum(theirs.values()) / 3 * count:.0f} "
        f"| {statistics.median(peers) / 1000 * count:.0f} |",
    ]


def cost_of_following(site: Site, record: RunRecord, seconds: float) -> list[str]:
    """Table of scheduler calls while following the logs of RANKS ranks."""
    llmctl = str(Path(sys.executable).with_name("llmctl"))
    attempt = Path(record.run_dir) / "attempts/1"
    logs = [attempt / f"rank-{rank:05d}.log" for rank in range(RANKS)]
    for name in ("out", "err"):
        logs += [site.home / f"slurm-{JOB_ID}-train-{replica}.{name}" for replica in range(NODES)]
    followers: dict[str, tuple[list[str], str]] = {
        f"llmctl logs -f --rank all, {RANKS} ranks": (
            [llmctl, "logs", "-f", "--rank", "all", record.run_id],
            "rank 63",
        ),
        f"torchx log -t, {NODES} replicas": (
            [str(PEERS / "torchx/bin/torchx"), "log", "-t", f"slurm://torchx/{JOB_ID}/train"],
            "train/7",
        ),
        "NeMo-Run Experiment.logs": (
            [str(PEERS / "nemo-run/bin/python"), str(site.home / "nemo.py"), str(NODES), str(site.home), "follow"],
            "",
        ),
    }
    lines = [f"| | scheduler calls in {seconds:.0f} s | log lines shown |", "|---|---|---|"]
    for name, (argv, mark) in followers.items():
        account = "a-a.t" if "NeMo" in name else "train"
        site.stand_in("sacct", sacct_table(account))
        site.count()
        with being_written(logs, site):
            text = follow(site, argv, seconds)
        lines.append(f"| {name} | {shown(site.count(), 1) or 'none'} | {text.count(mark) if mark else 'none'} |")
    return lines


def sacct_table(job_name: str) -> str:
    """Output of sacct --parsable2 for a running job.

    The output has one row per replica for TorchX, and one row for NeMo-Run.
    """
    rows = ["JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode"]
    if job_name == "train":
        rows += [f"{JOB_ID}+{replica}|train-{replica}|gpu|a|8|RUNNING|0:0" for replica in range(NODES)]
    else:
        rows.append(f"{JOB_ID}|{job_name}|gpu|a|8|RUNNING|0:0")
    return "\n".join(rows) + "\n"


def follow(site: Site, argv: list[str], seconds: float) -> str:
    """Output of a follower within ``seconds``, after which it is interrupted."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(argv, cwd=site.home, env=site.environment(), stdout=output, stderr=subprocess.STDOUT)
        time.sleep(seconds)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            process.send_signal(number)
            try:
                process.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                continue
        output.seek(0)
        return output.read().decode(errors="replace")


@contextmanager
def being_written(logs: list[Path], site: Site) -> Iterator[None]:
    """Run a process that writes to every log once per second, as ranks do."""
    program = (
        "import sys, time\nfor number in range(100000):\n    for path in sys.argv[1:]:\n"
        "        open(path, 'a').write(f'iteration {number}\\n')\n    time.sleep(1)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, *map(str, logs)], cwd=site.home)
    try:
        yield
    finally:
        writer.kill()
        writer.wait()


def shown(calls: Counter[str], rounds: int) -> str:
    return ", ".join(f"{name} {number / rounds:g}" for name, number in sorted(calls.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="repetitions of each dry run")
    parser.add_argument("--records", type=int, default=1000, help="number of runs for the status")
    parser.add_argument("--seconds", type=float, default=60, help="time of following logs")
    parser.add_argument("--write", action="store_true", help="also write the tables to benchmarks/results")
    flags = parser.parse_args()
    today = datetime.datetime.now(datetime.timezone.utc).date()
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        for name in ("sbatch", "scancel"):
            site.stand_in(name, f"{JOB_ID}\n")
        site.stand_in("sacct", sacct_table("train"))
        records = make_runs(site, flags.records)
        parts: list[tuple[str, Callable[[], list[str]]]] = [
            (f"CPU time of a dry run in ms, median of {flags.runs}", lambda: cpu_of_dry_run(site, flags.runs)),
            ("Status of many runs", lambda: cost_of_status(site, flags.records)),
            ("Following logs", lambda: cost_of_following(site, records[0], flags.seconds)),
        ]
        lines = [
            f"# Cluster costs, {today}",
            "",
            f"Stub scheduler; Python {platform.python_version()}, {platform.platform()}, TorchX 0.7.0, NeMo-Run "
            f"0.11.1 (leptonai 0.26.7), load average {os.getloadavg()[0]:.1f} at the start.",
        ]
        for title, measure in parts:
            lines += ["", f"## {title}", "", *measure()]
    text = "\n".join(lines) + "\n"
    print(text)
    if flags.write:
        (Path(__file__).with_name("results") / f"cluster_costs-{today}.md").write_text(text)


if __name__ == "__main__":
    main()
