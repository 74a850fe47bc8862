"""Notices of a run's events to a webhook, an address or a command: sent by the job, on its head node.

Each notice to each place has a process of its own with a time limit, so that a place that hangs or fails never touches
the run. Places: ``https://...`` (JSON by POST), ``secret:NAME`` (the same, its address in a secret), ``mailto:ADDRESS``
(by sendmail), ``command:PROGRAM ARGS`` (JSON on standard input).
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Dict, List, Mapping, Optional, Tuple

from .attempt import Attempt, tell
from .processes import SENDER
from .settings import JobSettings

SEND_S = 30.0
"""Seconds that one notice may take."""
_REQUEST_S = 15.0
_REAP_S = 0.05
_MAIL_FOLDERS = ("/usr/sbin", "/usr/lib")
"""Folders of sendmail, which need not be in PATH (Filesystem Hierarchy Standard 3.0, 4.9.2)."""


class Notices:
    """The notices of the attempts of one job."""

    def __init__(self, job: JobSettings, attempt: Attempt, secrets: Mapping[str, str], environ: Mapping[str, str]):
        """Prepare the notices; nothing is sent yet.

        Args:
            job: settings, with places and events.
            attempt: the first attempt.
            secrets: values of the job's secrets.
            environ: of the processes that send.
        """
        self._job = job
        self._attempt = attempt
        self._environ = {**environ, SENDER: "1"}
        names = {place: place[len("secret:") :] for place in job.notify if place.startswith("secret:")}
        self._addresses = {place: secrets.get(name, "") for place, name in names.items()}
        self._running: List[Tuple["subprocess.Popen[bytes]", float]] = []

    def begin(self, attempt: Attempt, job_id: str, cause: str = "") -> None:
        """Tell that an attempt has begun; ``cause``: of the failure of the attempt before in the same job."""
        self._attempt = attempt
        if attempt.number > 1:
            after = f" after: {cause}" if cause else ""
            self._send("restart", f"started again, as attempt {attempt.number} (job {job_id}){after}")
        else:
            self._send("begin", f"started (job {job_id})")

    def poll(self, hang: str = "") -> None:
        """Look at the time limits of running notices, and tell of a hang. Never waits. Call about twice a second.

        Args:
            hang: words on a hang that nobody was told of; empty without one.
        """
        self._reap()
        if hang:
            self._send("hang", hang)

    def end(self, code: int, reason: str, cause: str) -> None:
        """Tell how the attempt has ended, and wait until all notices are sent or their time is over."""
        iteration = _iteration(self._attempt.folder)
        at = "" if iteration is None else f" at iteration {iteration}"
        if reason == "failed":
            self._send("fail", f"failed{at} with exit code {code}" + (f": {cause}" if cause else ""))
        else:
            words = {"cancelled": "was cancelled", "timeout": "reached its time limit"}.get(reason, reason)
            self._send("end", f"{words}{at}")
        while self._running:
            self._reap()
            time.sleep(_REAP_S)

    def _send(self, event: str, words: str) -> None:
        if event not in self._job.notify_on:
            return
        job = self._job
        notice = {
            "event": event,
            "text": f"{job.run_id} {words}",
            "run_id": job.run_id,
            "run_dir": job.run_dir,
            "attempt": self._attempt.number,
            "time": int(time.time()),
        }
        for place in job.notify:
            values = {"place": place, "notice": notice, "address": self._addresses.get(place, place)}
            # A session of its own: a signal that ends the job must not end the notice of the end.
            with suppress(OSError):
                child = subprocess.Popen(
                    [sys.executable, "-IB", os.path.dirname(os.path.abspath(__file__)), "notify"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env=self._environ,
                    start_new_session=True,
                )
                self._running.append((child, time.monotonic() + SEND_S))
                with suppress(OSError):
                    # Less than a pipe holds, so that a child that never reads blocks nothing.
                    assert child.stdin is not None
                    child.stdin.write(json.dumps(values).encode())
                    child.stdin.close()

    def _reap(self) -> None:
        now, left = time.monotonic(), []
        for child, deadline in self._running:
            if child.poll() is None and now < deadline:
                left.append((child, deadline))
            elif child.returncode is None:
                with suppress(OSError):
                    os.killpg(child.pid, 9)
                child.wait()
                tell(f"a notice took more than {SEND_S:.0f} s and was given up")
        self._running = left


def _iteration(folder: str) -> Optional[int]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(f"{folder}/outcome.json", encoding="utf-8", errors="replace") as file:
            return int(json.loads(file.read())["iteration"])
    return None


def send(text: str, environ: Mapping[str, str]) -> int:
    """Send one notice; returns the exit code. A failure is one line of the job's log, without a secret.

    Args:
        text: JSON with ``place``, ``notice`` and the ``address`` of a webhook, which may be a secret.
        environ: of this process.
    """
    values = json.loads(text)
    place = str(values["place"])
    kind, _, rest = place.partition(":")
    shown = place if kind in ("mailto", "secret") else kind
    try:
        if kind == "command":
            _run(shlex.split(rest), json.dumps(values["notice"]) + "\n", values["notice"], environ)
        elif kind == "mailto":
            _mail(rest, values["notice"], environ)
        else:
            _post(str(values["address"]), values["notice"])
    except _NoticeError as error:
        tell(f"the notice to {shown} was not sent: {error}")
        return 1
    return 0


class _NoticeError(Exception):
    """A notice was not sent; the message has no secret."""


def _run(argv: List[str], text: str, notice: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    variables: Dict[str, str] = {"LLMCTL_EVENT": notice["event"], "LLMCTL_NOTICE": notice["text"]}
    variables["LLMCTL_RUN_ID"] = notice["run_id"]
    try:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, env={**environ, **variables})
    except OSError as error:
        raise _NoticeError(f"{argv[0]} cannot be started: {error.strerror}") from None
    child.communicate(text.encode())
    if child.returncode != 0:
        raise _NoticeError(f"{argv[0]} ended with exit code {child.returncode}")


def _mail(address: str, notice: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    folders = [environ.get("PATH", os.defpath), *_MAIL_FOLDERS]
    program = shutil.which("sendmail", path=os.pathsep.join(folders))
    if program is None:
        raise _NoticeError("this node has no sendmail; use a webhook or a command")
    subject = notice["text"].splitlines()[0][:200]
    # Header lines cannot be forged: the address has no line break (llmctl/site/notify.py), the subject is one line.
    text = f"To: {address}\nSubject: llmctl: {subject}\nContent-Type: text/plain; charset=utf-8\n\n{notice['text']}\n"
    _run([program, "-t", "-i"], f"{text}\n{notice['run_dir']}\n", notice, environ)


def _post(address: str, notice: Mapping[str, Any]) -> None:
    # Imported by the process that sends alone: the supervisor of every job starts without it.
    from urllib import error, request

    # Slack, Mattermost and Teams read "text", Discord "content".
    content = json.dumps({**notice, "content": notice["text"]}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "llmctl"}
    try:
        asked = request.Request(address.strip(), data=content, headers=headers)
        if asked.type not in ("http", "https"):
            raise _NoticeError("the address does not begin with https://")
        with request.urlopen(asked, timeout=_REQUEST_S):
            pass
    except error.HTTPError as problem:
        raise _NoticeError(f"the server answered {problem.code}") from None
    except error.URLError as problem:
        raise _NoticeError(f"the server cannot be reached: {getattr(problem.reason, 'strerror', None)}") from None
    except _NoticeError:
        raise
    except Exception as problem:
        # Texts of errors, and a traceback, may quote the address.
        raise _NoticeError(f"the address is not valid or does not answer ({type(problem).__name__})") from None
