"""The near end of the agent (see agent_program): starts it on a host, and calls it. One call is one round trip."""

import secrets
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.connection import Channel, Connection, wait_for
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.frames import FrameError, FrameReader, pack
from llmctl.transport.ssh.program import program

PING_S = 5.0
"""While we wait for an answer we show that we are there, and want to hear the same."""
SILENCE_S = 20.0
"""Silence after which the connection counts as lost."""
START_PATIENCE_S = 60.0
"""Starting Python from a busy network file system has been seen to take half a minute."""

_CANDIDATES = (
    "python3 python3.13 python3.12 python3.11 python3.10 python3.9 python3.8 python3.7 /usr/libexec/platform-python"
)
# Run by whatever login shell the user has: one line, single quotes only, and in them nothing that csh or fish would
# touch. Python 3.7 and later ends with 0 or 97 or by a signal; anything else is no Python, or too old a one.
# -I -S: neither the user's variables nor the site's packages take part. -X utf8: paths are bytes, whatever the locale.
_BOOT = (
    "import sys; sys.version_info < (3, 7) and sys.exit(99); import zlib; i = sys.stdin.buffer; "
    "exec(zlib.decompress(i.read(int(i.readline()))))"
)
COMMAND = (
    "exec sh -c 'IFS= read -r w; IFS= read -r m; "
    'case "$w" in "~/"*) w="$HOME/${w#??}";; esac; '
    f'if [ "$w" ]; then set -- "$w"; else set -- {_CANDIDATES}; fi; '
    'for p do command -v "$p" >/dev/null 2>&1 || continue; '
    f'"$p" -I -S -X utf8 -c "{_BOOT}"; s=$?; '
    "case $s in 0|97|12[89]|1[3-9]?|2??) exit $s;; esac; done; "
    'echo; echo "$m none"; exit 9\''
)


class AgentClient:
    """An agent that runs.

    Attributes:
        home: the user's home directory there.
        python: the interpreter that the agent found.
    """

    def __init__(self, channel: Channel, host: str, received: bytes) -> None:
        self._channel = channel
        self._host = host
        self._reader = FrameReader()
        self._reader.feed(received)
        self._number = 0
        self._is_broken = False
        self._lock = threading.Lock()
        hello = self._receive(START_PATIENCE_S)
        self._note_time(hello)
        self.home: str = hello["home"]
        self.python: str = hello["python"]

    @classmethod
    def start(cls, connection: Connection, host: str, python: str | None = None) -> "AgentClient":
        """Start the agent on the other side.

        Raises:
            SchedulerError: there is no Python that can run it, or the login shell is in the way.
        """
        channel = connection.start(COMMAND)
        try:
            marker = f"llmctl-agent-{secrets.token_hex(8)}"
            payload = zlib.compress(program("llmctl.transport.ssh.agent_program", marker))
            # A shell that refuses may have left before it has read this; what it said is told below.
            with suppress(ConnectionLost):
                channel.write(f"{python or ''}\n{marker}\n{len(payload)}\n".encode() + payload)
            before, after = wait_for(channel, f"{marker}".encode(), START_PATIENCE_S)
            if after is None:
                raise _start_failure(channel, host, before)
            if not after:
                after = channel.read(START_PATIENCE_S) or b""
            if after.startswith(b" "):
                wanted = f"{python} of login.python" if python else "python3"
                raise SchedulerError(
                    f"{host}: {wanted} is not there, or older than 3.7; load or install one, "
                    "and name its path as login.python in the cluster's profile",
                    transient=False,
                )
            return cls(channel, host, after[1:])
        except BaseException:
            channel.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it can be called, as far as is known here."""
        return not self._is_broken and self._channel.is_open

    def now(self) -> float:
        """The time by the clock there, as it was with the last answer; asks nobody."""
        return self._time + time.monotonic() - self._time_came

    def call(self, act: str, *args: Any, **options: Any) -> Any:
        """Have the agent do something, and return what it returns; one caller at a time.

        Raises:
            OSError: what the act raised there.
            ConnectionLost: no answer; whether it was done is not known.
        """
        with self._lock:
            self._number += 1
            number = self._number
            try:
                self._send({"number": number, "act": act, "args": args, "options": options})
                answer = self._receive(None)
                while answer.get("number") != number:  # a sign of life, or the answer to a call that was given up
                    answer = self._receive(None)
            except (ConnectionLost, FrameError):
                self._is_broken = True
                raise
        self._note_time(answer)
        if "os_error" in answer:
            raise OSError(*answer["os_error"])
        if "failure" in answer:
            raise RuntimeError(f"{self._host}: {act} failed there:\n{answer['failure']}")
        return answer["value"]

    def close(self) -> None:
        """The agent ends with its input."""
        self._is_broken = True
        self._channel.close()

    def _note_time(self, answer: Any) -> None:
        self._time, self._time_came = float(answer["time"]), time.monotonic()

    def _send(self, value: Any) -> None:
        frame = pack(value)
        try:
            self._channel.write(frame)
        except BaseException:
            self._is_broken = True  # half a frame may have gone: nothing can follow it
            raise

    def _receive(self, patience_s: float | None) -> Any:
        """The next frame. None: as long as it takes, if only the other side shows that it lives."""
        heard = time.monotonic()
        while (frame := self._reader.next()) is None:
            data = self._channel.read(PING_S)
            if data:
                heard = time.monotonic()
                self._reader.feed(data)
            elif data is None and time.monotonic() - heard < (patience_s or SILENCE_S):
                if patience_s is None:
                    self._send({"ping": True})
            else:
                raise self._lost(data is None)
        return frame[0]

    def _lost(self, is_silent: bool) -> ConnectionLost:
        self._is_broken = True
        if is_silent:
            return ConnectionLost(f"{self._host}: connection lost: not a sign of life for {SILENCE_S:.0f} s")
        said = self._channel.stderr_tail().splitlines()
        return ConnectionLost(
            f"{self._host}: connection lost: closed by the other side{': ' if said else ''}{said[-1] if said else ''}"
        )


def _start_failure(channel: Channel, host: str, printed: bytes) -> SchedulerError:
    lines: Sequence[str] = [
        *printed.decode("utf-8", errors="replace").splitlines(),
        *channel.stderr_tail().splitlines(),
    ]
    said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    if channel.is_open:
        return SchedulerError(
            f"{host}: Python did not start within {START_PATIENCE_S:.0f} s; last said: {said}", transient=True
        )
    return SchedulerError(
        f"{host}: the login shell runs no commands; it said: {said}\ndoes `ssh {host} echo hello` print hello?",
        transient=False,
    )
