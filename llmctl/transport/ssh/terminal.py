"""The user's terminal: asks for passwords, and connects a command on another machine to the terminal."""

import fcntl
import os
import select
import signal
import struct
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from llmctl.terminal_text import printable
from llmctl.transport.ssh.failures import ConnectionLost, PromptRefused

_TTY = "/dev/tty"
_SEND_AGAIN_S = 0.02


class Terminal:
    """Asks on the controlling terminal, one question at a time, from any thread.

    Attributes:
        path: the terminal.
    """

    def __init__(self, path: str = _TTY) -> None:
        self.path = path
        self._asking = threading.Lock()
        self._before: list[Any] | None = None

    @property
    def is_there(self) -> bool:
        """True if the terminal can be opened."""
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        except OSError:
            return False
        return True

    def ask(self, question: str, *, shows_answer: bool = False) -> str:
        """Ask a question; return the answer without its line end.

        Raises:
            PromptRefused: there is no terminal, or it was closed.
            KeyboardInterrupt: the user pressed Ctrl-C.
        """
        with self._asking:
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            except OSError:
                raise PromptRefused(f"there is no terminal to ask on: {question.strip()}") from None
            try:
                return self._ask(descriptor, question, shows_answer)
            except (OSError, termios.error):
                raise PromptRefused(f"the terminal was closed: {question.strip()}") from None
            finally:
                os.close(descriptor)

    def restore(self) -> None:
        """Switch the echo on again, even if a thread still waits for an answer."""
        before, self._before = self._before, None
        if before is None:
            return
        with suppress(OSError, termios.error):
            descriptor = os.open(self.path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)
            finally:
                os.close(descriptor)

    def _ask(self, descriptor: int, question: str, shows_answer: bool) -> str:
        silent = termios.tcgetattr(descriptor)
        silent[3] &= ~termios.ECHO
        self._before = termios.tcgetattr(descriptor)
        try:
            if not shows_answer:
                termios.tcsetattr(descriptor, termios.TCSAFLUSH, silent)
            os.write(descriptor, printable(question).encode(errors="replace"))
            answer = b""
            while not answer.endswith(b"\n"):
                data = os.read(descriptor, 1024)
                if not data:
                    raise PromptRefused(f"the terminal was closed: {question.strip()}")
                answer += data
        finally:
            self.restore()
            if not shows_answer:
                with suppress(OSError):
                    os.write(descriptor, b"\n")
        return answer.rstrip(b"\r\n").decode(errors="surrogateescape")


class Answers(Terminal):
    """A function in the place of the terminal, one question at a time, from any thread."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__(path="")
        self._answer = answer

    @property
    def is_there(self) -> bool:
        """True: the function can be asked."""
        return True

    def ask(self, question: str, *, shows_answer: bool = False) -> str:  # noqa: ARG002
        """Ask the function; its errors are the caller's."""
        with self._asking:
            return self._answer(question)


class InteractiveChannel(Protocol):
    """A command in a session on a terminal. Every call may raise ConnectionLost."""

    def fileno(self) -> int:
        """Descriptor that is readable if output has come, or has ended."""

    def read(self, timeout_s: float) -> bytes | None:
        """Read standard output; b"" at its end, None after ``timeout_s`` without data."""

    def read_stderr(self) -> bytes:
        """Standard error that has come; b"" if none has."""

    def write_some(self, data: bytes) -> int:
        """Send as much to standard input as the host accepts at once; return the number of bytes sent."""

    def end_input(self) -> None:
        """Close standard input."""

    def resize(self, columns: int, rows: int) -> None:
        """Report a new size of the window."""


def window_size(descriptor: int) -> tuple[int, int]:
    """Columns and rows of a terminal."""
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(descriptor, termios.TIOCGWINSZ, b"\0" * 8))
    return columns or 80, rows or 24


@contextmanager
def raw_mode(descriptor: int) -> Iterator[None]:
    """Pass every key to the host; restore the terminal at the end, also after an error."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def lend(channel: InteractiveChannel, *, has_pty: bool, is_alive: Callable[[], bool]) -> int | None:
    """Connect our standard streams to a channel until its output ends; return the signal that ended us, or None.

    Args:
        channel: of the command.
        has_pty: True if our standard input is a terminal, and the command has a terminal on the host.
        is_alive: True as long as the host answers; called about once a second.
    """
    asked: list[int] = []
    descriptor = sys.stdin.fileno()
    numbers = [signal.SIGTERM, signal.SIGHUP] + ([] if has_pty else [signal.SIGINT])
    before = {number: signal.signal(number, lambda sent, _frame: asked.append(sent)) for number in numbers}
    if has_pty:

        def resize(*_: object) -> None:
            with suppress(ConnectionLost, OSError):  # a session that is ending accepts no size
                channel.resize(*window_size(descriptor))

        before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, resize)
    try:
        if has_pty:
            with raw_mode(descriptor):
                _pass_on(channel, descriptor, asked, is_alive)
        else:
            _pass_on(channel, descriptor, asked, is_alive)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return asked[0] if asked else None


def _pass_on(channel: InteractiveChannel, descriptor: int, asked: list[int], is_alive: Callable[[], bool]) -> None:
    typed, is_listening, output = b"", True, channel.fileno()
    while not asked and is_alive():
        # While the host accepts no input, its output is read: it may wait for that.
        awaited = [output, descriptor] if is_listening and not typed else [output]
        ready = select.select(awaited, [], [], _SEND_AGAIN_S if typed else 1.0)[0]
        if output in ready:
            if said := channel.read_stderr():
                _write(2, said)
            elif data := channel.read(0.0):
                _write(1, data)
            elif data is not None:
                return
        try:
            if descriptor in ready:
                typed = os.read(descriptor, 1 << 16)
                if not typed:
                    is_listening = False
                    channel.end_input()
            typed = typed[channel.write_some(typed) :] if typed else b""
        except ConnectionLost:
            # The command may have ended before its input. The end of its output tells.
            typed, is_listening = b"", False


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
