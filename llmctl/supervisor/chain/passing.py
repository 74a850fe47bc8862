"""Hand-over of a run from a job to its next one: the same job.sh goes to the scheduler again."""

import os
import socket
import subprocess
import time
from contextlib import suppress
from typing import Any, Dict, List, Mapping, Tuple

from ..attempt import Attempt, tell
from ..restarts import read_history, read_object, read_reached
from ..settings import ChainSettings, JobSettings
from .decision import JobEnd, last_job_reason, read_used
from .links import cancelled_name, link_name, passed_name

SUBMIT_TIMEOUT_S = 60.0
"""For one answer of the scheduler: little time is left before the job's own limit."""
PAUSES_S = (0.0, 2.0, 5.0)
"""Pauses before the tries. One whose answer was lost may have been taken: of two next jobs one starts nothing."""
_ANSWER = 2000
"""Characters kept of an answer."""


class Chain:
    """The chain of a run, at one of its jobs."""

    def __init__(self, job: JobSettings, chain: ChainSettings, link: int, environ: Mapping[str, str]) -> None:
        """Remember the job's settings, its place in the chain and the environment of the submit command."""
        self._job = job
        self._chain = chain
        self._link = link
        self._environ = dict(environ)

    def values(self, attempt: Attempt, reason: str, failure_class: str, *, is_late: bool) -> Dict[str, Any]:
        """Values of exit.json at the end of the job: ``passes_on``, or ``not_chained`` with the reason.

        Args:
            attempt: that has just ended.
            reason: of its end.
            failure_class: of a failure; empty for another end.
            is_late: the job began after its time limit.
        """
        if reason not in ("timeout", "failed"):
            return {}
        job = self._job
        reached = read_reached(job.run_dir, attempt.number)
        history = read_history(job, reached).reached
        end = JobEnd(reason, failure_class, history, read_used(job, attempt.number, time.time()), is_late)
        values = {"trained": reached.trained, "saved": reached.saved}
        ends = "the run was cancelled" if self._is_cancelled() else last_job_reason(job, self._chain, end)
        if ends:
            tell(f"no next job follows: {ends}")
            return {**values, "not_chained": ends}
        return {**values, "passes_on": True}

    def pass_on(self, attempt: Attempt) -> bool:
        """Let the next job begin, and submit it; if that fails, exit.json of this attempt says why.

        Args:
            attempt: the last one of this job, whose exit.json is written.
        """
        job, folder = self._job, f"{self._job.run_dir}/attempts"
        said, problem = "", "the run was cancelled"
        if not self._is_cancelled():
            try:
                with open(f"{folder}/{passed_name(job.submission, self._link)}", "w") as file:
                    file.write("\n")
                said, problem = self._submit()
            except OSError as error:
                problem = f"{folder} cannot be written: {error.strerror}"
        if problem:
            tell(f"the next job was not submitted: {problem}; llmctl resume {job.run_id} continues")
            further = {"passes_on": False, "not_chained": f"the next job was not submitted: {problem}"}
            attempt.write("exit.json", {**read_object(f"{attempt.folder}/exit.json"), **further})
            return False
        values = {"link": self._link + 1, "time": int(time.time()), "said": said[-_ANSWER:]}
        Attempt(0, folder).write(link_name(job.submission, self._link), values)
        tell(f"link {self._link + 1} of the chain is submitted: {_last_line(said)}")
        return True

    def _submit(self) -> Tuple[str, str]:
        """The scheduler's answer, and the reason if there is none."""
        problem = ""
        for pause_s in PAUSES_S:
            time.sleep(pause_s)
            try:
                process = subprocess.Popen(
                    list(self._chain.argv),
                    cwd=self._job.run_dir,
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            except OSError as error:
                # Not there now, not there in a few seconds.
                return "", f"{self._chain.argv[0]} on {socket.gethostname()}: {error.strerror}"
            try:
                out, errors = process.communicate(timeout=SUBMIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                problem = f"the scheduler has not answered within {SUBMIT_TIMEOUT_S:.0f} s"
                continue
            said = out.decode(errors="replace")
            if process.returncode == 0:
                return said, ""
            words = _last_line(errors.decode(errors="replace")) or _last_line(said)
            problem = f"{words or 'no output'} (exit code {process.returncode} on {socket.gethostname()})"
        return "", problem

    def _is_cancelled(self) -> bool:
        names: List[str] = []
        with suppress(OSError):
            names = os.listdir(f"{self._job.run_dir}/attempts")
        return cancelled_name(self._job.submission) in names


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
