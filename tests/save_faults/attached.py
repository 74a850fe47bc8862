"""strace(1), attached to a process while it saves: it counts system calls on given paths, or makes one of them fail."""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")


class Strace:
    """A context manager; at its end the process goes on alone."""

    def __init__(self, pid, output, options):
        """Attach to all threads of ``pid``, also to later ones.

        Raises:
            AssertionError: strace cannot attach.
        """
        self.output = Path(output)
        command = ["strace", "-f", "-y", "-s", "0", "-o", str(output), "-p", str(pid), *options]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        said = self._process.stderr.readline()
        if " attached" not in said:
            said += self._process.communicate()[1]
            raise AssertionError(f"strace cannot attach: {said.strip()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.send_signal(signal.SIGINT)
        self._process.communicate()

    def calls(self):
        """Name and arguments of each call, in order."""
        lines = (_LINE.match(line) for line in self.output.read_text().splitlines())
        return [(line[1], line[2], line[3]) for line in lines if line]


def lack_of_strace():
    """Reason to skip the tests; None if strace can attach here."""
    if shutil.which("strace") is None:
        return "needs strace"
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with Strace(sleeper.pid, "/dev/null", ["-e", "trace=none"]):
            return None
    except AssertionError as error:
        return str(error)
    finally:
        with contextlib.suppress(ProcessLookupError):
            sleeper.kill()
        sleeper.communicate()


def on_paths(paths):
    """Options that leave all other paths alone."""
    return [option for path in paths for option in ("-P", str(path))]


def numbered(calls):
    """Each name with its running number among the calls of that name, which strace counts for each thread."""
    seen = Counter()
    found = []
    for thread, name, _ in calls:
        seen[thread, name] += 1
        found.append((name, seen[thread, name]))
    return found
