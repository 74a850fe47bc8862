"""Installed packages that stand in the way: a stranger named apex, and whatever does not work when it is used.

They are looked at without importing them: one that was built for another torch or CUDA can end the process. What is
installed is tried in a process of its own. Torch-free.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

LIMIT_S = 120.0
"""For trying one package: an import of torch from a busy network file system takes tens of seconds."""
_ENDING_S = 10.0
_DONE = 86
"""Exit code of a trial that came to its end. A package may end the process itself, and call that success."""
_MOST_READ = 1 << 16
"""Bytes of what a trial says that are looked at, from the end."""


def unrelated_apex(search_path: Sequence[str] | None = None) -> str | None:
    """A sentence with the cure if the ``apex`` that Python would import is not NVIDIA's; else None.

    ``pip install apex`` gets a toolkit for the Pyramid web framework, whose last version is 0.9.10dev; NVIDIA's is not
    on the index (https://github.com/NVIDIA/apex, "Installation"). They are told apart by ``apex/optimizers``, a folder
    that only NVIDIA's has, so that neither has to be run.

    Args:
        search_path: folders in the place of sys.path.
    """
    found = PathFinder.find_spec("apex", None if search_path is None else list(search_path))
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    if not folders or any((Path(folder) / "optimizers").is_dir() for folder in folders):
        return None
    return _on_one_line(
        f"the package apex in {Path(folders[0]).parent} is not NVIDIA's but a web toolkit of the same name; remove it: "
        "python -m pip uninstall apex (nothing here needs apex; NVIDIA's is installed from its source alone)"
    )


def use_problem(program: str, limit_s: float = LIMIT_S) -> str | None:
    """Why a program that uses a package does not end well here; None if it does.

    Found out in a process of its own, which may crash or hang.

    Args:
        program: Python that uses it.
        limit_s: for trying it.
    """
    problem = _trial_problem(program, limit_s)
    return None if problem is None else _on_one_line(problem)


def _on_one_line(text: str) -> str:
    """The same without what a terminal would act on: ends of lines, escapes, and whatever else cannot be printed."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _trial_problem(program: str, limit_s: float) -> str | None:
    """What happens when a package is used by a program, in a process that is ended after ``limit_s``."""
    program = f"import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n{program}\nsys.exit({_DONE})"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"using it took longer than {limit_s:.0f} s"
        finally:
            # With all that it has started, such as a compiler.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                # One that hangs in a driver is not even ended by that.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)
        said.seek(max(0, said.seek(0, os.SEEK_END) - _MOST_READ))
        lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    if code == _DONE:
        return None
    if code < 0:
        return f"using it ended in {signal.Signals(-code).name}"
    return _explained(lines[-1][:300] if lines else f"using it ended with exit code {code}")


def _explained(line: str) -> str:
    """The last line of a failure, with what it means where that is known."""
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
