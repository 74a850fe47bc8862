"""A help page as text: in panels and colours on a terminal, plain elsewhere."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmctl.cli.console import is_for_people
from trainer.config.help.page import HelpPage, page_width, plain_text, section_lines, usage_lines, wrapped

if TYPE_CHECKING:
    from rich.text import Text

_NARROWEST = 40
"""Columns below which the frames of panels take too much room."""
_FRAME = 4
_FLAG, _VALUE, _TITLE, _FRAME_COLOUR, _PLAIN = "bold cyan", "yellow", "bold not dim", "dim", "not bold default"


def help_text(page: HelpPage, environment: Mapping[str, str]) -> str:
    """The page for standard output, without the last newline."""
    width = page_width()
    if not is_for_people() or environment.get("TERM") == "dumb" or width < _NARROWEST:
        return plain_text(page, width)
    return _panels(page, width, has_colour=not environment.get("NO_COLOR"))


def _panels(page: HelpPage, width: int, *, has_colour: bool) -> str:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(width=width, highlight=False, color_system="auto" if has_colour else None)
    with console.capture() as captured:
        usage = Text("\n".join(usage_lines(page, width)))
        usage.stylize(_TITLE, 0, len("Usage:"))
        console.print(usage, end="\n\n")
        for text in page.paragraphs:
            console.print(Text("\n".join(wrapped(text, width - 2, "  "))), end="\n\n")
        for section in page.sections:
            lines = [
                _line(name, text, is_command=section.is_commands)
                for name, text in section_lines(page, section, width - _FRAME)
            ]
            title = Text(section.title, style=_TITLE)
            console.print(Panel(Text("\n").join(lines), title=title, title_align="left", border_style=_FRAME_COLOUR))
        for text in page.notes:
            console.print(Text("\n".join(["", *wrapped(text, width - 2, "  ")])))
    return captured.get().rstrip("\n")


def _line(name: str, text: str, *, is_command: bool) -> "Text":
    from rich.text import Text

    line = Text(name, style=_FLAG if is_command else _VALUE)
    line.highlight_regex(r"(?<![\w-])--?[a-zA-Z][\w-]*", _FLAG)
    line.highlight_regex(r",(?= )", _PLAIN)
    return line.append(text, style=_PLAIN)
