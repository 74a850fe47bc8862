"""Argument parser with one-line errors, and printing for commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from trainer.config.help.of_parser import page_of
from trainer.config.help.page import page_width, plain_text

_USAGE = 2


class CommandParser(argparse.ArgumentParser):
    """Parser whose errors are a sentence and the help's name; exit code 2. Its help is a page like llmctl's."""

    def format_help(self) -> str:
        """The page as plain text."""
        return plain_text(page_of(self), page_width()) + "\n"

    def error(self, message: str) -> NoReturn:
        """Print ``message`` on standard error and exit with code 2."""
        self.exit(_USAGE, f"{self.prog.removeprefix('python -m ')}: {message}\nsee {self.prog} --help\n")


class Refused(argparse.Action):
    """A flag of Megatron-LM that is refused.

    ``const`` says why, and what to do instead.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, const: str) -> None:
        """Register the flag; ``const`` is the sentence without the flag's name."""
        super().__init__(
            option_strings, dest, nargs="*", const=const, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print the sentence and exit with code 2."""
        prog = parser.prog.removeprefix("python -m ")
        parser.exit(_USAGE, f"{prog}: {self.option_strings[0]}: {self.const}\n")


class WithoutEffect(argparse.Action):
    """A flag of Megatron-LM that is accepted and ignored; ``help`` says why."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str, nargs: int = 0) -> None:
        """Register the flag, which takes ``nargs`` values."""
        metavar = ("VALUE",) * nargs if nargs else None
        super().__init__(option_strings, dest, nargs=nargs, default=argparse.SUPPRESS, help=help, metavar=metavar)

    def __call__(self, *_: Any) -> None:
        """Ignore the flag."""


def print_text(text: str, end: str = "\n") -> None:
    """Print ``text`` and ``end``; characters outside the terminal's encoding become backslash escapes.

    A reader that closes the pipe early, such as ``head``, is accepted:
    https://docs.python.org/3/library/signal.html#note-on-sigpipe.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
    except BrokenPipeError:
        # Otherwise the interpreter would report the error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
