"""Trial of a package in a separate process, which a package for another torch or CUDA can crash. Torch-free."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

LIMIT_S = 120.0
"""Limit of one trial: importing torch from a busy file system takes tens of seconds."""
_ENDING_S = 10.0
_DONE = 86
"""Exit code of a completed trial. A package may itself exit with code 0."""
_MOST_READ = 1 << 16
"""Bytes of a trial's output that are read, from the end."""


def use_problem(program: str, limit_s: float = LIMIT_S) -> str | None:
    """Run a program in a separate process, which may crash or hang.

    Args:
        program: Python code that uses the package.
        limit_s: time limit in seconds.

    Returns:
        The reason for a failure, or None.
    """
    problem = _trial_problem(program, limit_s)
    # On one line, without terminal escapes.
    return None if problem is None else "".join(one if one.isprintable() else "?" for one in problem)


def _trial_problem(program: str, limit_s: float) -> str | None:
    """Run a trial, and return the reason for a failure or None."""
    program = f"import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n{program}\nsys.exit({_DONE})"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"using it took longer than {limit_s:.0f} s"
        finally:
            # Kill its children too, such as a compiler.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                # A process that hangs in a driver survives SIGKILL.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)
        output.seek(max(0, output.seek(0, os.SEEK_END) - _MOST_READ))
        lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    if code == _DONE:
        return None
    if code < 0:
        return f"using it ended in {signal.Signals(-code).name}"
    return _explained(lines[-1][:300] if lines else f"using it ended with exit code {code}")


def _explained(line: str) -> str:
    """The last line of a failure, with its meaning if known."""
    library = re.search(r"(lib\w+)\.so[.\d]*: cannot open shared object file", line)
    if "undefined symbol" in line:
        meaning = "it was built for another torch than the installed one"
    elif "cudnn" in line.lower():
        meaning = "cuDNN is not found"
    elif library is not None:
        meaning = f"{library[0].split(':')[0]} is not found: it was built for another CUDA than torch"
    elif "busy or unavailable" in line:
        meaning = "the GPU lets one process in at a time, and another one is using it"
    elif "no kernel image" in line:
        meaning = "it was not compiled for the GPUs here"
    elif "GLIBC" in line and "not found" in line:
        meaning = "it was built on a newer Linux"
    else:
        return f"using it fails: {line}"
    return f"{meaning} ({line})"
