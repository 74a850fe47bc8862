"""The lines that a screen shows, and waits for them."""

import html
import re
import time
from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot

from llmctl.watch.app import WatchApp
from llmctl.watch.demo import BEGIN, DemoRuns
from llmctl.watch.source import RunSource, Watching
from llmctl.watch.widgets import RowList
from tests.waiting import HANG_S

_TEXT = re.compile(r'<text[^>]* x="([\d.]+)"[^>]*clip-path="url\(#[^)]*-line-(\d+)\)"[^>]*>(.*?)</text>', re.DOTALL)
_LETTER = 12.2  # rich's width of a character


def shown(app: WatchApp) -> str:
    """The text on the screen, line by line, from textual's own picture of it."""
    rows: dict[int, str] = {}
    for x, row, text in _TEXT.findall(app.export_screenshot()):
        line = rows.get(int(row), "").ljust(round(float(x) / _LETTER))
        rows[int(row)] = line + html.unescape(text).replace("\u00a0", " ").rstrip("\n")
    return "\n".join(rows.get(row, "").rstrip() for row in range(app.size.height))


async def until(pilot: Pilot[None], *parts: str | Callable[[], object], absent: str = "") -> str:
    """Wait until the screen shows all parts, and conditions are true; returns the screen.

    Raises:
        AssertionError: it has not come in HANG_S seconds.
    """
    end = time.monotonic() + HANG_S
    while True:
        screen = shown(pilot.app)  # type: ignore[arg-type]
        if all(part in screen if isinstance(part, str) else part() for part in parts) and not (
            absent and absent in screen
        ):
            return screen
        assert time.monotonic() < end, f"waited for {parts}; the screen shows\n{screen}"
        await pilot.pause(0.02)


async def open_run(pilot: Pilot[None], run_id: str) -> None:
    """Wait for a run in the table, move to it and open it."""
    await until(pilot, run_id)
    rows = pilot.app.screen.query_one("#runs", RowList)
    while rows.highlighted_option is None or rows.highlighted_option.id != run_id:
        await pilot.press("down")
    await pilot.press("enter")


def app_of(source: RunSource, run_id: str | None = None, **options: Any) -> WatchApp:
    """The screen over a source that is read at a quick pace."""
    return WatchApp(Watching(source, **{"interval_s": 0.05, **options}), run_id)


def demo_app(*, at_s: float = 20.0, **options: Any) -> WatchApp:
    """The demonstration as it is ``at_s`` seconds after its begin, standing still."""
    return app_of(DemoRuns(lambda: BEGIN + at_s), **options)
