"""``llmctl watch`` as a command: on a real terminal, and where there is none."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from llmctl.cli.main import main
from tests.waiting import HANG_S


class Screen:
    """``llmctl watch`` on a terminal of 80 x 24."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.terminal, self.inner = pty.openpty()
        fcntl.ioctl(self.inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.inner)
        ends = {"stdin": self.inner, "stdout": self.inner, "stderr": self.inner}
        environment = {**os.environ, "TERM": "xterm-256color", **variables}
        argv = [sys.executable, "-m", "llmctl", "watch", *arguments]
        self.process = subprocess.Popen(argv, env=environment, start_new_session=True, **ends)  # type: ignore[call-overload]
        self.output = b""

    def read_until(self, words: bytes) -> None:
        """Wait for output."""
        end = time.monotonic() + HANG_S
        while words not in self.output:
            assert time.monotonic() < end, f"waited for {words!r} in {self.output!r}"
            if select.select([self.terminal], [], [], 1.0)[0]:
                self.output += os.read(self.terminal, 65536)

    def press(self, keys: bytes) -> None:
        """Type keys."""
        os.write(self.terminal, keys)

    def close(self) -> None:
        """End what is left."""
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)
        os.close(self.inner)


@pytest.fixture
def screen(home):
    screens = []
    assert Path.cwd() == home

    def start(*arguments: str, **variables: str) -> Screen:
        screens.append(Screen(*arguments, **variables))
        return screens[-1]

    yield start
    for one in screens:
        one.close()


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}])
def test_the_demonstration_runs_on_a_terminal_and_leaves_it_as_it_was(home, screen, variables):
    files = sorted(home.rglob("*"))
    shown = screen("--demo", **variables)
    # One run of each cluster: the mark stays on the run that came first, wherever its row is then.
    for run in (b"gpt-350m-c2a8", b"llama-8b-91c0"):
        shown.read_until(run)
    shown.press(b"\x1b[H\x1b[B\r")
    shown.read_until(b"ranks: 32")
    shown.press(b"2")
    shown.read_until(b"cn102")
    if "NO_COLOR" in variables:
        assert re.findall(rb"\x1b\[(?:\d+;)*(?:3[1-6]|9[0-7])[;m]", shown.output) == []
        assert b"\x1b[7;" in shown.output  # the highlighted row
    if "PYTHONIOENCODING" in variables:
        assert b"\\u" not in shown.output
    shown.press(b"q")
    shown.read_until(b"\x1b[?1049l")  # the screen that was there before
    shown.read_until(b"\x1b[?25h")  # the cursor
    assert shown.process.wait(HANG_S) == 0
    assert termios.tcgetattr(shown.inner) == shown.before
    assert sorted(home.rglob("*")) == files


def test_ctrl_c_ends_the_screen_too(screen):
    shown = screen("--demo")
    shown.read_until(b"gpt-350m-c2a8")
    shown.press(b"\x03")
    shown.read_until(b"\x1b[?1049l")
    assert shown.process.wait(HANG_S) in (0, 130)
    assert termios.tcgetattr(shown.inner) == shown.before


@pytest.mark.usefixtures("home")
def test_without_a_terminal_a_sentence_names_status(capsys):
    assert main(["watch"]) == 2
    assert capsys.readouterr().err == (
        "llmctl: watch: needs a terminal; elsewhere, llmctl status --watch prints the states again and again\n"
    )


@pytest.mark.usefixtures("home")
def test_a_demonstration_takes_no_runs(capsys):
    assert main(["watch", "--demo", "first"]) == 2
    assert "--demo: shows made-up runs only; leave out RUN and --cluster" in capsys.readouterr().err


@pytest.mark.usefixtures("home")
def test_the_start_of_other_commands_imports_no_textual():
    script = (
        "import sys; from llmctl.cli.main import main; main(['status']); main(['watch', '--help']);"
        "assert not [name for name in sys.modules if name.startswith(('textual', 'llmctl.watch'))]"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
