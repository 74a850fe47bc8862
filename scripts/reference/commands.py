"""Pages of the commands and of the exit codes."""

import inspect
from collections.abc import Iterator
from typing import Any

from llmctl import errors
from llmctl.cli.help.of_command import page_of
from llmctl.cli.main import PANELS, HelpContext, app, load_command
from scripts.reference.markdown import code, page, required_text, table
from trainer.__main__ import COMMANDS as TRAINER_COMMANDS
from trainer.commands.draw_pipeline import parser_of as draw_pipeline
from trainer.config.help.of_parser import page_of as page_of_parser
from trainer.config.help.page import HelpPage

_COMMANDS = """# Commands

Every command of llmctl with its arguments and flags, as `--help` prints them. `python -m scripts.reference` makes this
page from the tables of the code."""
_TRAINER = """## python -m trainer

The programs that jobs run; llmctl starts them. `pretrain` takes `--config FILE`, a flag for every
[config key](config.md), and [the flags of Megatron-LM](../guide/megatron-flags.md). The commands that llmctl has too
take the flags of llmctl's."""
_EXIT_CODES = """# Exit codes

Of llmctl. `llmctl interactive -- COMMAND` returns the exit code of COMMAND. `python -m scripts.reference` makes this
page from `llmctl/errors.py`."""


def commands_page() -> str:
    """The page of all commands."""
    import typer.main

    top = page_of(HelpContext(typer.main.get_command(app), info_name="llmctl"))
    blocks = [_COMMANDS, "## llmctl", *help_blocks("llmctl", top)]
    for names in PANELS.values():
        for name in names:
            blocks += _command_blocks(f"llmctl {name}", load_command(name), level=2)
    rows = [
        (code(name), required_text(name, text, "in trainer/__main__.py"))
        for name, (_, text) in TRAINER_COMMANDS.items()
    ]
    drawing = help_blocks("draw-pipeline", page_of_parser(draw_pipeline()))
    return page(*blocks, _TRAINER, table(("command", "meaning"), rows), "### python -m trainer draw-pipeline", *drawing)


def _command_blocks(path: str, command: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} {path}"
    yield from help_blocks(path, page_of(HelpContext(command, info_name=path)))
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command_blocks(f"{path} {name}", inner, level + 1)


def help_blocks(path: str, help_page: HelpPage) -> Iterator[str]:
    """Usage, text and tables of a help page.

    Raises:
        MissingText: a command or flag has no text.
    """
    yield f"```text\nUsage: {help_page.usage}\n```"
    yield from (required_text(path, text, "below its function") for text in help_page.paragraphs)
    for section in help_page.sections:
        rows = [(code(row.name), required_text(f"{path} {row.name}", row.text, "as its help")) for row in section.rows]
        yield table((section.title, "meaning"), rows)
    yield from (required_text(path, text, "as its epilog") for text in help_page.notes)


def exit_codes_page() -> str:
    """The page of llmctl's exit codes."""
    meanings: dict[int, list[str]] = {
        0: ["Done."],
        errors.BUG: ["A bug of llmctl."],
        errors.INTERRUPTED: ["Interrupted."],
    }
    for kind in vars(errors).values():
        if isinstance(kind, type) and "exit_code" in vars(kind) and kind is not errors.LlmctlError:
            text = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
            meanings.setdefault(kind.exit_code, []).append(required_text(kind.__name__, text, "in llmctl/errors.py"))
    rows = [(str(number), " ".join(texts)) for number, texts in sorted(meanings.items())]
    return page(_EXIT_CODES, table(("code", "meaning"), rows))
