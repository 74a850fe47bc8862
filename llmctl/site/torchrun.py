"""``submit --torchrun -- script.py ARGS``: a user's own program, started as the trainer's ranks are."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl.errors import UsageError

_PYTHON = re.compile(r"(?P<folder>.*/)?python[0-9.]*")
_FORMS = "give -- script.py ARGS, -- python script.py ARGS or -- -m MODULE ARGS"


@dataclass(frozen=True)
class TorchrunWords:
    """Words of a call of torch.distributed.run.

    Attributes:
        python: the interpreter.
        program: the script or ``-m MODULE``, with its arguments.
    """

    python: str
    program: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the script or module."""
        return self.program[1] if self.program[0] == "-m" else Path(self.program[0]).stem


def torchrun_words(command: Sequence[str], python: str) -> TorchrunWords:
    """The interpreter and the program of a COMMAND.

    Args:
        command: begins with a script, with ``-m``, or with a Python before these. A Python with a path is kept.
        python: the interpreter of the cluster's jobs.

    Raises:
        UsageError: the COMMAND has another form.
    """
    words = list(command)
    named = _PYTHON.fullmatch(words[0]) if words else None
    if named is not None:
        python = words[0] if named["folder"] else python
        words = words[1:]
    if len(words) > 1 and words[0] == "-m":
        return TorchrunWords(python, tuple(words))
    if words and words[0].endswith(".py"):
        return TorchrunWords(python, tuple(words))
    found = f"{words[0]!r} is neither a Python script nor -m MODULE" if words else "no program is given"
    raise UsageError(f"--torchrun: {found}; {_FORMS}")


def python_script_problem(script: str) -> str:
    """Message about a Python script in the place of CONFIG: the ways to run the script."""
    return (
        f"CONFIG: {script} is a Python script; `llmctl submit --torchrun -- {script} ARGS` starts it in every rank, "
        f"`llmctl submit -- python {script} ARGS` once on every node"
    )
