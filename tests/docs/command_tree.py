"""Check of a command line against the commands and flags that exist, without running it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import typer.main

from llmctl.cli.main import COMMANDS, app, load_command, split_command
from tests.docs.shown_commands import ROOT
from trainer.config import checkpoint_flags, data_flags, evaluate_flags, generate_flags

_OF_TRAINER: dict[str, Callable[[str, Sequence[str]], Any]] = {
    "data": data_flags.parse,
    "checkpoint": checkpoint_flags.parse,
    "generate": lambda _, words: generate_flags.parse(words),
    "evaluate": lambda _, words: evaluate_flags.parse(words),
}


def problem_of(words: Sequence[str], *, is_whole: bool = True) -> str | None:
    """Words on a command line that is wrong; ``N`` stands for a number; without ``is_whole`` it may lack arguments."""
    program, *rest = words
    if program == "make":
        return _problem_of_make(rest)
    if program == "pip":
        return _problem_of_pip(rest)
    if program.endswith("llmctl"):
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                _parse(rest, is_whole)
        except SystemExit:
            return errors.getvalue().strip()
        except Exception as error:  # click's errors have no public base in typer
            return None if type(error).__name__ == "MissingParameter" and not is_whole else str(error)
        return None
    is_module = rest[0] == "-m"
    exists = importlib.util.find_spec(rest[1]) is not None if is_module else (ROOT / rest[0]).is_file()
    return None if exists else f"{rest[is_module]}: there is no such program"


def _parse(words: Sequence[str], is_whole: bool) -> None:
    own, _ = split_command(["1" if word == "N" else word for word in words])
    if own[0].startswith("-"):
        typer.main.get_command(app).make_context("llmctl", [*own], resilient_parsing=True)
        return
    name, *arguments = own
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name}")
    command: Any = load_command(name)
    while arguments and hasattr(command, "commands") and not arguments[0].startswith("-"):
        if arguments[0] not in command.commands:
            raise ValueError(f"{name} has no command {arguments[0]}")
        command = command.commands[arguments.pop(0)]
    if not arguments and not is_whole:
        return
    parsed = command.make_context(command.name, arguments)
    if name in _OF_TRAINER and not hasattr(command, "commands"):
        _OF_TRAINER[name](str(command.name), parsed.args)


def _problem_of_make(words: Sequence[str]) -> str | None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = [word for word in words if word not in targets and not re.fullmatch(r"[A-Z_]+=.*", word)]
    return f"the Makefile has no target {', '.join(wrong)}" if wrong else None


def _problem_of_pip(words: Sequence[str]) -> str | None:
    _, _, section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")
    extras = set(re.findall(r"^([\w-]+) = \[", section.partition("\n[")[0], re.MULTILINE))
    named = {extra for word in words for extra in re.findall(r"^\.\[([\w,]+)\]$", word)}
    return f"pyproject.toml has no extra {', '.join(sorted(named - extras))}" if named - extras else None
