"""llmctl on a terminal of a given width."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Sequence


def on_terminal(arguments: Sequence[str], columns: int, code: int = 0, **variables: str) -> str:
    """Standard output and standard error of llmctl on a terminal.

    Args:
        arguments: words after ``llmctl``.
        columns: width of the terminal.
        code: the expected exit code.
        variables: environment variables beside those of the test.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        argv = [sys.executable, "-m", "llmctl", *arguments]
        os.execve(sys.executable, argv, {**kept, "TERM": "xterm-256color", **variables})
    output = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the program has closed its side
            break
        output += part
        if not part:
            break
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, output
    return output.decode().replace("\r\n", "\n")


def without_colours(output: str) -> str:
    """The text without the escape sequences of colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", output)
