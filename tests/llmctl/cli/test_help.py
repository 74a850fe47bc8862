"""Help: plain in pipes, panels and colours on terminals, one look for the pages of llmctl and of the trainer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmctl.cli.main import COMMANDS, PANELS, load_command, main
from tests.llmctl.terminal import on_terminal
from trainer.config.data_flags import parser_of
from trainer.config.help.of_parser import notes_of
from trainer.config.help.page import HelpPage, Row, Section, plain_text

ROOT = Path(__file__).parents[3]
ESCAPE, FRAME = "\x1b", set("─│╭╮╰╯")
COMMAND_PATHS = [
    *COMMANDS,
    *(f"{name} {inner}" for name in COMMANDS for inner in getattr(load_command(name), "commands", {})),
]


@pytest.fixture
def page_of(home, capsys, monkeypatch):
    """Function: a command's help in a pipe of 80 columns."""
    del home
    monkeypatch.setenv("COLUMNS", "80")

    def read(path):
        assert main([*path.split(), "--help"]) == 0
        return capsys.readouterr().out

    return read


@pytest.mark.parametrize("path", ["", *COMMAND_PATHS])
def test_every_page_is_plain_in_a_pipe_and_has_our_headings(path, page_of):
    page = page_of(path)
    assert page.startswith(f"Usage: llmctl {path}".rstrip())
    assert ESCAPE not in page and not FRAME & set(page)
    assert [line for line in page.splitlines() if len(line) > 80] == []
    rest = page.partition("\n\n")[2]
    assert "..." not in rest, "a text is cut"
    headings = re.findall(r"^(\S.*):$", rest, re.MULTILINE)
    assert "Options" in headings or path == "submit"
    assert all(heading[0].isupper() for heading in headings) and len(headings) == len(set(headings))
    assert not re.search(r"<\w+(\[\w+\])?>|TEXT\.\.\.|INTEGER", page.replace("<extra_id_i>", ""))
    assert "None" not in page and "Default: .\n" not in page
    assert page.count("-h, --help") == 1


def test_every_command_stands_in_one_panel_with_its_whole_line(page_of):
    names = [name for commands in PANELS.values() for name in commands]
    assert sorted(names) == sorted(set(names)) == sorted(COMMANDS)
    page = page_of("")
    parts = re.split(r"^(\S.*):$", page, flags=re.MULTILINE)
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert [title for title in shown if title != "Options"] == list(PANELS)
    for title, commands in PANELS.items():
        rows = [tuple(line.split(maxsplit=1)) for line in shown[title].strip().splitlines()]
        assert rows == [(name, text) for name, (_, text) in commands.items()]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("arguments", [["--help"], ["submit", "--help"], ["data", "prepare", "--help"]])
def test_a_terminal_shows_panels_in_colour_up_to_its_width(arguments):
    page = on_terminal(arguments, 80)
    assert "\x1b[1;36m" in page and "╭─" in page
    lines = re.sub(r"\x1b\[[0-9;]*m", "", page).splitlines()
    assert ESCAPE not in "".join(lines)
    assert max(map(len, lines)) == 80


@pytest.mark.usefixtures("home")
def test_a_wide_terminal_is_used_up_to_120_columns():
    lines = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(["submit", "--help"], 200)).splitlines()
    assert max(map(len, lines)) == 120


@pytest.mark.usefixtures("home")
def test_no_color_has_panels_without_colour():
    page = on_terminal(["generate", "--help"], 80, NO_COLOR="1")
    assert "╭─ On a cluster" in page and ESCAPE not in page


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"COLUMNS": "30"}])
def test_a_dumb_or_narrow_terminal_is_plain(variables):
    page = on_terminal(["--help"], 80, **variables)
    assert ESCAPE not in page and not FRAME & set(page) and "Start:" in page


@pytest.mark.usefixtures("home")
def test_plain_help_does_not_load_rich():
    program = (
        "import sys; from llmctl.cli.main import main; main(['submit', '--help']); sys.exit('rich' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.usefixtures("home")
def test_completion_describes_commands_in_full():
    """A shell asks llmctl itself, with these variables."""
    asks = {**os.environ, "_LLMCTL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "llmctl c"}
    program = "from llmctl.cli.main import main; main([])"
    shown = subprocess.run([sys.executable, "-c", program], env=asks, capture_output=True, text=True, check=True).stdout
    assert '"cancel":"End runs' in shown and COMMANDS["checkpoint"][1].partition(": ")[2] in shown


@pytest.mark.parametrize(
    "arguments",
    ["--help", "data --help", "data prepare --help", "checkpoint --help", "checkpoint show -h", "generate -h"],
)
def test_the_trainer_shows_pages_without_typer_and_rich(arguments):
    without = "import sys; sys.modules |= {'typer': None, 'rich': None}"
    program = f"{without}; from trainer.__main__ import main; main(sys.argv[1:])"
    argv = [sys.executable, "-c", program, *arguments.split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"})
    assert done.stdout.startswith("Usage: ") and done.stderr == ""
    assert "Options:\n" in done.stdout and "usage:" not in done.stdout


def test_flags_without_effect_are_named_last_and_documented(page_of):
    (note,) = notes_of(parser_of("prepare"))
    page = page_of("data prepare")
    assert " ".join(page.split()).endswith(note)
    guide = (ROOT / "docs/guide/data.md").read_text(encoding="utf-8")
    flags = re.findall(r"--[\w-]+", note)
    assert len(flags) > 10 and [flag for flag in flags if f"`{flag}`" not in guide] == []


def test_long_names_take_a_line_and_words_stay_whole():
    rows = (Row("--x N", "Short."), Row("--a-flag-with-a-long-name VALUE", "Takes --another-long-flag."))
    page = HelpPage("p [OPTIONS]", ("What it does.",), (Section("Options", rows),))
    assert plain_text(page, 30) == (
        "Usage: p [OPTIONS]\n\n  What it does.\n\nOptions:\n  --x N  Short.\n  --a-flag-with-a-long-name\n  VALUE\n"
        "         Takes\n         --another-long-flag."
    )
