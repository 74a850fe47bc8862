"""Command line surface as text: ``python -m tests.command_surface > tests/command_surface.txt`` after a change.

Commands, arguments and flags are a contract with users and their scripts: they are added to, never renamed.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import typer.main

from llmctl.cli.main import COMMANDS, app, load_command
from llmctl.cli.trainer.trainer_job import TrainerCommand


def surface() -> str:
    """Every command with its arguments and flags, one per line."""
    lines = ["llmctl", *_parameters(typer.main.get_command(app))]
    for name in COMMANDS:
        lines += _command(f"llmctl {name}", load_command(name))
    return "\n".join(lines) + "\n"


def _command(path: str, command: Any) -> Iterator[str]:
    yield path
    yield from _parameters(command)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(f"{path} {name}", inner)


def _parameters(command: Any) -> Iterator[str]:
    if isinstance(command, TrainerCommand):
        yield from _flags_of_the_trainer(command.trainer_parser())
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield f"    {parameter.metavar or parameter.name}"
            continue
        names = " ".join(sorted({*parameter.opts, *parameter.secondary_opts}, key=lambda name: (len(name), name)))
        value = "" if parameter.is_flag else f" {parameter.metavar or parameter.type.name}"
        yield f"    {names}{value}{' ...' if parameter.multiple else ''}"


def _flags_of_the_trainer(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        names = " ".join(sorted(action.option_strings, key=lambda name: (len(name), name)))
        choices = "|".join(action.choices) if action.choices else action.metavar
        value = choices[0] if isinstance(choices, tuple) else choices or ("VALUE" if action.nargs != 0 else "")
        is_repeatable = isinstance(action, argparse._ExtendAction | argparse._AppendAction) or action.nargs in (
            "*",
            "+",
        )
        yield "    " + " ".join(part for part in (names, value, "..." if is_repeatable else "") if part)


if __name__ == "__main__":
    print(surface(), end="")
