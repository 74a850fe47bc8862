"""Client of the agent (see agent_program): starts the agent on a host and calls it. One call is one round trip."""

import secrets
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.connection import Channel, Connection, wait_for
from llmctl.transport.ssh.failures import ConnectionLost, told_as_lost
from llmctl.transport.ssh.frames import FrameError, FrameReader, pack
from llmctl.transport.ssh.program import program

START_TIMEOUT_S = 60.0
"""Starting Python from a busy network file system has taken half a minute."""

_CANDIDATES = (
    "python3 python3.13 python3.12 python3.11 python3.10 python3.9 python3.8 python3.7 /usr/libexec/platform-python"
)
# Runs in any login shell: one line, single quotes only, and inside the quotes nothing that csh or fish would expand.
# Python 3.7 and later exits with 0 or 97 or by a signal. Any other exit status means no Python, or a Python too old.
# -I -S: ignore the user's variables and the site's packages. -X utf8: paths are bytes, whatever the locale.
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
    """Connection to a running agent.

    Attributes:
        home: the user's home directory on the host.
        python: the interpreter that runs the agent.
        ping_s: interval of the pings in both directions while the client waits for an answer.
        silence_s: seconds of silence after which the connection counts as lost.
    """

    ping_s = 5.0
    silence_s = 20.0

    def __init__(self, channel: Channel, host: str, received: bytes) -> None:
        self._channel = channel
        self._host = host
        self._reader = FrameReader()
        self._reader.feed(received)
        self._number = 0
        self._is_broken = False
        self._lock = threading.Lock()
        hello = self._receive(START_TIMEOUT_S)
        self._note_time(hello)
        self.home: str = hello["home"]
        self.python: str = hello["python"]

    @classmethod
    def start(cls, connection: Connection, host: str, python: str | None = None) -> "AgentClient":
        """Start the agent on the host.

        Raises:
            SchedulerError: the host has no Python that can run the agent, or its login shell runs no commands.
        """
        channel = connection.start(COMMAND)
        try:
            marker = f"llmctl-agent-{secrets.token_hex(8)}"
            payload = zlib.compress(program("llmctl.transport.ssh.agent_program", marker))
            # A shell that refuses may have exited before it reads this. Its output is in the error below.
            with suppress(ConnectionLost):
                channel.write(f"{python or ''}\n{marker}\n{len(payload)}\n".encode() + payload)
            before, after = wait_for(channel, f"{marker}".encode(), START_TIMEOUT_S)
            if after is None:
                raise _start_failure(channel, host, before)
            if not after:
                after = channel.read(START_TIMEOUT_S) or b""
            if after.startswith(b" "):
                wanted = f"{python} of login.python" if python else "python3"
                raise SchedulerError(
                    f"{host}: {wanted} is missing, or older than 3.7; load or install Python 3.7 or later, "
                    "and set login.python in the cluster's profile to its path",
                    transient=False,
                )
            return cls(channel, host, after[1:])
        except BaseException:
            channel.close()
            raise

    @property
    def is_open(self) -> bool:
        """True if the agent can be called, as far as this side knows."""
        return not self._is_broken and self._channel.is_open

    def now(self) -> float:
        """Time by the host's clock, extrapolated from the last answer without a round trip."""
        return self._time + time.monotonic() - self._time_came

    def call(self, act: str, *args: Any, **options: Any) -> Any:
        """Call a function of the agent and return its result; one caller at a time.

        Raises:
            OSError: raised by the function on the host.
            ConnectionLost: no answer came; the function may or may not have run.
        """
        with self._lock:
            self._number += 1
            number = self._number
            try:
                self._send({"number": number, "act": act, "args": args, "options": options})
                answer = self._receive(None)
                while answer.get("number") != number:  # a ping, or the answer to an abandoned call
                    answer = self._receive(None)
            except (ConnectionLost, FrameError):
                self._is_broken = True
                raise
        self._note_time(answer)
        if "os_error" in answer:
            raise OSError(*answer["os_error"])
        if "failure" in answer:
            raise RuntimeError(f"{self._host}: {act} failed on the host:\n{answer['failure']}")
        return answer["value"]

    def close(self) -> None:
        """End the agent by closing its input."""
        self._is_broken = True
        self._channel.close()

    def _note_time(self, answer: Any) -> None:
        self._time, self._time_came = float(answer["time"]), time.monotonic()

    def _send(self, value: Any) -> None:
        frame = pack(value)
        try:
            self._channel.write(frame)
        except BaseException:
            self._is_broken = True  # half a frame may have been sent, and no further frame can follow
            raise

    def _receive(self, patience_s: float | None) -> Any:
        """Next frame. ``patience_s`` None: wait without limit, as long as the other side answers pings."""
        heard = time.monotonic()
        while (frame := self._next()) is None:
            data = self._channel.read(self.ping_s)
            if data:
                heard = time.monotonic()
                self._reader.feed(data)
            elif data is None and time.monotonic() - heard < (patience_s or self.silence_s):
                if patience_s is None:
                    self._send({"ping": True})
            else:
                raise self._lost(data is None)
        return frame[0]

    def _next(self) -> tuple[Any] | None:
        with told_as_lost(self._host, FrameError, zlib.error):
            return self._reader.next()

    def _lost(self, is_silent: bool) -> ConnectionLost:
        self._is_broken = True
        if is_silent:
            return ConnectionLost(f"{self._host}: connection lost: no response for {self.silence_s:.0f} s")
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
    if channel.read(0.0) is None:
        return SchedulerError(
            f"{host}: Python did not start within {START_TIMEOUT_S:.0f} s; its last output: {said}", transient=True
        )
    if channel.exit_status() is None:
        return ConnectionLost(f"{host}: connection lost before Python started; the last output: {said}")
    return SchedulerError(
        f"{host}: the login shell does not run commands; its output: {said}\n"
        f"check that `ssh {host} echo hello` prints hello",
        transient=False,
    )
