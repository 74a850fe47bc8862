"""llmctl in a process of its own, with its output read as it comes."""

import os
import pty
import select
import subprocess
import sys
import time

from tests.waiting import HANG_S

LLMCTL = (sys.executable, "-m", "llmctl.cli.main")


class Follower:
    """A following llmctl with its output read as it comes; optionally on its own terminal."""

    def __init__(self, *arguments, terminal=False):
        reader, writer = pty.openpty() if terminal else os.pipe()
        environment = {**os.environ, "COLUMNS": "200", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [*LLMCTL, *arguments], stdout=writer, stderr=writer, env=environment, start_new_session=True
        )
        os.close(writer)
        self.reader, self.seen = reader, ""

    def wait_for(self, text):
        end = time.monotonic() + HANG_S
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} was not shown, but {self.seen!r}"
            self._read(0.1)

    def end(self):
        """Wait for the end; returns the exit code."""
        end = time.monotonic() + HANG_S
        while self.process.poll() is None:
            assert time.monotonic() < end, f"does not end; showed {self.seen!r}"
            self._read(0.1)
        while self._read(0.0):
            pass
        return self.process.returncode

    def _read(self, patience_s):
        if not select.select([self.reader], [], [], patience_s)[0]:
            return False
        try:
            data = os.read(self.reader, 65536)
        except OSError:  # the other end of the terminal was closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

    def close(self):
        self.process.kill()
        self.process.wait(HANG_S)
        os.close(self.reader)
