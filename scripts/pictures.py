"""Pictures of llmctl in a terminal, for the documentation: ``make pictures`` records docs/pictures again.

Every command runs in a terminal (pty) of 80 or 120 columns with an empty home, and its output becomes an SVG, light
and dark. The home is called /home/you in them, and the checkout /home/you/llmctl. Of a line that a program rewrites,
the last state is kept. Times and speeds are those of the machine that records. The live screens are those of
``llmctl watch --demo``, always at the same moment. ``python scripts/pictures.py DIR`` writes to another folder, and
``--watch`` records the live screens only.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from textual.pilot import Pilot

from llmctl.watch.app import WatchApp
from llmctl.watch.demo import BEGIN, DemoRuns
from llmctl.watch.source import Watching

ROOT = Path(__file__).parents[1]
HOME = "/home/you"
_SUBMIT = "llmctl submit --nodes 2 --set parallel.tensor_model_parallel_size=2 --name first --follow"
# Newline, carriage return, an escape sequence, or text.
_PARTS = re.compile(r"\n|\r|\x1b\[[0-9;?]*[A-Za-z]|[^\n\r\x1b]+")
# Picture -> command, and the output at which the picture is taken (none: at the end of the command).
SCREENS = {
    "submit": (_SUBMIT, r" 6\d/100 [^\r\n]*"),
    "status": ("llmctl status first", ""),
    "plan": ("llmctl plan examples/llama3_8b.yaml --cluster aws-p5 --nodes 2", ""),
}
# Live screen -> the run that is opened, its tab, and text that tells that all has come.
LIVE = {
    "watch": ("", "", "1 failed"),
    "watch-run": ("llama-8b-91c0", "1", "68.8 GiB"),
    "watch-ranks": ("qwen-14b-07bf", "2", "! "),
    "watch-attempts": ("llama-8b-91c0", "4", "attempt 1"),
    "watch-log": ("llama-8b-5d13", "5", "1375/4000"),
}
SIZES = {80: 24, 120: 40}
_MOMENT_S = 20.0
# Background, text, and the eight colours of a terminal. Bright black is the grey of dim parts.
_COLOURS = [(179, 29, 40), (17, 99, 41), (125, 78, 0), (9, 105, 218), (130, 80, 223), (27, 124, 131), (87, 96, 106)]
_LIGHT = TerminalTheme((255, 255, 255), (36, 41, 47), [(36, 41, 47), *_COLOURS], [(160, 168, 176), *_COLOURS])
_DARK = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)
THEMES = {"light": _LIGHT, "dark": _DARK}
_ROW = 24.4  # rich's height of a row, for letters of 20 pixels
# As rich's own, without its font from the network and without the frame of a window.
_FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} HEIGHT">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect width="100%" height="100%" rx="8" fill="BACKGROUND"/>
<g transform="translate(9, 8)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main(arguments: Sequence[str]) -> int:
    """Record every screen into a folder."""
    names = [word for word in arguments if word != "--watch"]
    target = Path(names[0]) if names else ROOT / "docs/pictures"
    target.mkdir(parents=True, exist_ok=True)
    for width, height in SIZES.items():
        for name in LIVE:
            for theme in THEMES:
                write(
                    target, name, width, theme, live_svg(asyncio.run(live_screen(name, width, height)), height, theme)
                )
        if "--watch" in arguments:
            continue
        with tempfile.TemporaryDirectory(prefix="llmctl-pictures-") as home:
            for name, (command, moment) in SCREENS.items():
                text = recorded(command, width, Path(home))
                taken = re.search(moment, text) if moment else None
                lines = [f"$ {command}", *screen_lines(neutral(text[: taken.end()] if taken else text, home))]
                for theme in THEMES:
                    write(target, name, width, theme, svg(lines, width, theme))
    return 0


def write(target: Path, name: str, width: int, theme: str, picture: str) -> None:
    """Write one picture; the name says the width if it is not the usual one."""
    path = target / f"{name}{'' if width == min(SIZES) else f'-{width}'}-{theme}.svg"
    path.write_text(picture, encoding="utf-8")
    print(path)


async def live_screen(name: str, width: int, height: int) -> Console:
    """A screen of the demonstration, recorded."""
    run_id, tab, words = LIVE[name]
    app = WatchApp(Watching(DemoRuns(lambda: BEGIN + _MOMENT_S), interval_s=0.1), run_id or None)
    async with app.run_test(size=(width, height)) as pilot:
        if tab:
            await pilot.press(tab)
        elif not run_id:
            await drawn(pilot, words)
            await pilot.press("down", "down")
            await pilot.pause()
        return await drawn(pilot, words)


async def drawn(pilot: Pilot[None], words: str) -> Console:
    """The screen as soon as it has these words."""
    app = pilot.app
    while True:
        with Path(os.devnull).open("w") as nowhere:
            console = Console(
                width=app.size.width, record=True, file=nowhere, force_terminal=True, height=app.size.height
            )
            # The picture of textual itself has one theme, and loads a font from a network.
            console.print(app.screen._compositor.render_update(full=True))
        if words in console.export_text(clear=False):
            return console
        await pilot.pause(0.05)


def live_svg(console: Console, rows: int, theme: str) -> str:
    """A picture of a recorded live screen."""
    return console.export_svg(theme=THEMES[theme], code_format=frame_of(rows, theme), unique_id="t")


def frame_of(rows: int, theme: str) -> str:
    """The frame of a picture of some rows."""
    frame = _FRAME.replace("HEIGHT", str(round(rows * _ROW + 20)))
    return frame.replace("BACKGROUND", THEMES[theme].background_color.hex)


def recorded(command: str, width: int, home: Path) -> str:
    """Everything that a command of llmctl writes to a terminal of ``width`` columns.

    Raises:
        SystemExit: the command failed.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    words = [sys.executable, "-m", *command.split()]
    process = subprocess.Popen(words, cwd=ROOT, env=environment(home), stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    parts = []
    while part := read(master):
        parts.append(part)
    os.close(master)
    text = b"".join(parts).decode()
    if process.wait():
        raise SystemExit(f"{command}: exit code {process.returncode}\n{text}")
    return text


def read(master: int) -> bytes:
    """The next output of a terminal; empty at its end, which Linux reports as an error."""
    try:
        return os.read(master, 65536)
    except OSError:
        return b""


def environment(home: Path) -> dict[str, str]:
    """Variables of a user with an empty home; built kernels keep their place."""
    cache = Path(os.environ.get("LLMCTL_CACHE_DIR") or Path.home() / ".cache/llmctl")
    return {
        "HOME": str(home),
        "LLMCTL_CACHE_DIR": str(cache),
        "LANG": "C.UTF-8",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
        "OMP_NUM_THREADS": "1",
    }


def screen_lines(text: str) -> list[str]:
    """Lines of a terminal's output, as they stand at the end: text at the beginning of a line replaces the line."""
    lines, row, replaces = [""], 0, False
    for part in _PARTS.findall(text):
        if part == "\n":
            row, replaces = row + 1, False
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            replaces = True
        elif up := re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(up[1] or 1))
        elif re.fullmatch(r"\x1b\[\d?K", part):
            lines[row] = ""
        elif part.startswith("\x1b") and not part.endswith("m"):
            continue  # shows or hides the cursor
        else:
            lines[row], replaces = part if replaces else lines[row] + part, False
    return "\n".join(lines).rstrip().split("\n")


def neutral(text: str, home: str) -> str:
    """The text with the paths of a neutral home and checkout."""
    return text.replace(home, HOME).replace(str(ROOT), f"{HOME}/llmctl")


def svg(lines: Sequence[str], width: int, theme: str) -> str:
    """A picture of lines with ANSI colours."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=width, record=True, file=nowhere, force_terminal=True, highlight=False)
        for line in AnsiDecoder().decode("\n".join(lines)):
            console.print(line, overflow="fold", soft_wrap=False)
    rows = console.export_text(clear=False).count("\n")
    return console.export_svg(theme=THEMES[theme], code_format=frame_of(rows, theme), unique_id="t")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
