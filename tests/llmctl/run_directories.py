"""Handmade run directories, as job.sh and the trainer leave them."""

import json
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from llmctl.backends.base import SubmittedJob
from llmctl.runs.record import RunRecord, Submission
from llmctl.transport.local import LocalTransport
from llmctl.transport.processes import ProcessIdentity

TRANSPORT = LocalTransport({})


@dataclass
class MadeRun:
    """One run directory with its record."""

    record: RunRecord

    @property
    def path(self) -> Path:
        return self.record.run_dir

    def submit(self, identity: ProcessIdentity | None, *, age_s: float = 5.0) -> "MadeRun":
        """Record a submission with the given process as job.sh; None records no job."""
        jobs = ()
        if identity is not None:
            job = SubmittedJob("localhost", str(identity.pid), identity.pid, identity.start_time, identity.boot_id)
            jobs = (job,)
        number = len(self.record.submissions) + 1
        self.record = self.record.with_submission(Submission(number, time.time() - age_s, jobs))
        self.record.save(TRANSPORT)
        return self

    def submit_to_queue(self, job_id: str | None, *, age_s: float = 3600.0) -> "MadeRun":
        """Record a submission with the scheduler's job ``job_id``; None: the scheduler's answer was never recorded."""
        jobs = (SubmittedJob("login", job_id),) if job_id is not None else ()
        number = len(self.record.submissions) + 1
        self.record = self.record.with_submission(Submission(number, time.time() - age_s, jobs))
        self.record.save(TRANSPORT)
        return self

    def start_attempt(self, number: int = 1, *, host: str | None = None, **changes: object) -> Path:
        """Make attempts/K for the last submission, as job.sh does."""
        folder = self.path / "attempts" / str(number)
        for name in ("heartbeat", "errors"):
            (folder / name).mkdir(parents=True)
        job = self.record.submissions[-1].jobs[0] if self.record.submissions[-1].jobs else None
        values = {
            "attempt": number,
            "submission": self.record.submissions[-1].number,
            "job_id": job.job_id if job else None,
            "host": host or socket.gethostname(),
            "pid": job.pid if job else None,
            "pid_start_time": job.pid_start_time if job else None,
            "boot_id": job.boot_id if job else None,
            "time": time.time() - 5,
        }
        (folder / "started.json").write_text(json.dumps({**values, **changes}))
        return folder

    def metrics(self, *iterations: int, attempt: int = 1, **changes: object) -> None:
        """Append metrics rows."""
        with (self.path / "metrics.jsonl").open("a") as file:
            for iteration in iterations:
                row = {
                    "attempt": attempt,
                    "iteration": iteration,
                    "lm_loss": 10.0 - iteration / 10,
                    "tokens_per_s": 5000.0,
                    "mfu": 0.25,
                    "iteration_time_s": 0.5,
                    "time": time.time() - 1,
                }
                file.write(json.dumps({**row, **changes}) + "\n")


def beat(
    attempt: Path,
    rank: int,
    *,
    age_s: float,
    iteration: int = 7,
    phase: str = "forward",
    host: str = "n1",
    pid: int = 1,
    **more: object,
) -> None:
    values = {
        **more,
        "rank": rank,
        "host": host,
        "pid": pid,
        "iteration": iteration,
        "phase": phase,
        "time": time.time() - age_s,
    }
    (attempt / "heartbeat" / f"rank-{rank:05d}.json").write_text(json.dumps(values))


def fail(
    attempt: Path,
    rank: int,
    message: str,
    *,
    age_s: float,
    kind: str = "RuntimeError",
    host: str = "n1",
    module: str = "builtins",
) -> None:
    values = {
        "rank": rank,
        "coordinates": f"rank {rank} (pp 0, dp {rank}, tp 0)",
        "host": host,
        "iteration": 7,
        "type": kind,
        "message": message,
        "traceback": "",
        "module": module,
        "time": time.time() - age_s,
    }
    (attempt / "errors" / f"rank-{rank:05d}.json").write_text(json.dumps(values))


def leave(attempt: Path, reason: str, code: int = 0, signal: str | None = None) -> None:
    values = {"code": code, "reason": reason, "signal": signal, "time": time.time(), "node": socket.gethostname()}
    (attempt / "exit.json").write_text(json.dumps(values))


def outcome(attempt: Path, reason: str, iteration: int) -> None:
    (attempt / "outcome.json").write_text(json.dumps({"reason": reason, "iteration": iteration, "time": time.time()}))


def make_run(
    runs_root: Path,
    run_id: str = "demo-261121-120000-abcd",
    *,
    train_iters: int | None = 100,
    cluster: str = "local",
) -> MadeRun:
    """Make a run directory without a submission. ``train_iters`` None makes the run a COMMAND's."""
    run_dir = runs_root / run_id
    run_dir.mkdir(parents=True)
    record = RunRecord(
        run_id=run_id,
        name=run_id.partition("-")[0],
        created=time.time() - 10,
        llmctl_version="0.1.0",
        cluster=cluster,
        run_dir=run_dir,
        command=("llmctl", "submit"),
        job={"nodes": 2},
        config={"training": {"train_iters": train_iters}} if train_iters is not None else None,
        origins={},
        code={"trainer": None, "commit": None, "diff": None},
    )
    record.save(TRANSPORT)
    return MadeRun(record)


def recycled(identity: ProcessIdentity) -> ProcessIdentity:
    """The same pid, of a process that ended before the given process began."""
    return replace(identity, start_time=(identity.start_time or 1) - 1)
