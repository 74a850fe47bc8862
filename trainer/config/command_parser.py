"""A parser of flags that says what is wrong in one sentence, and the output of commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_USAGE = 2


class CommandParser(argparse.ArgumentParser):
    """Ends with one line on standard error and exit code 2 where argparse shows every flag there is."""

    def error(self, message: str) -> NoReturn:
        """Say ``message`` and end."""
        self.exit(_USAGE, f"{self.prog.removeprefix('python -m ')}: {message} (--help shows all flags)\n")


class Refused(argparse.Action):
    """A flag of another program that cannot do here what it does there: ``const`` says why, and what to do."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str) -> None:
        """``const`` is the sentence, without the flag."""
        super().__init__(
            option_strings, dest, nargs="*", const=const, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """End with the sentence."""
        prog = parser.prog.removeprefix("python -m ")
        parser.exit(_USAGE, f"{prog}: {self.option_strings[0]}: {self.const}\n")


class WithoutEffect(argparse.Action):
    """A flag of another program that changes nothing here; ``help`` says why."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str, nargs: int = 0) -> None:
        """It takes ``nargs`` values."""
        metavar = ("VALUE",) * nargs if nargs else None
        super().__init__(option_strings, dest, nargs=nargs, default=argparse.SUPPRESS, help=help, metavar=metavar)

    def __call__(self, *_: Any) -> None:
        """Pass it over."""


def print_text(text: str) -> None:
    """Print a line or more; characters that the terminal's encoding has not got are spelled out.

    Whoever reads it may stop, as ``head`` does: https://docs.python.org/3/library/signal.html#note-on-sigpipe.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # Else the interpreter would complain when it flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
