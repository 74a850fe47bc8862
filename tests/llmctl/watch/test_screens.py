"""The live screen: every key, every state, sources that fail, hang or are hostile, and terminals of many kinds."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from llmctl.errors import SchedulerError
from llmctl.runs.view_text import cells, reason
from llmctl.watch.app import WatchApp
from llmctl.watch.demo import BEGIN, DemoRuns
from llmctl.watch.source import ClusterLook, Listing, RunPage
from llmctl.watch.widgets import LogView, RowList
from tests.llmctl.watch.screens import app_of, demo_app, open_run, shown, until

Play = Callable[[Pilot[None]], Coroutine[Any, Any, None]]
HOSTILE = "[red]x[/red]\x1b[31m\x1b]0;title\x07\x9b2J[/]"
HARMLESS = "[red]x[/red]"


def play(app: WatchApp, act: Play, size: tuple[int, int] = (80, 24)) -> None:
    """Run the screen without a terminal, and act on it."""

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await act(pilot)

    asyncio.run(run())


def missing(screen: str, width: int) -> list[str]:
    """The runs and values of the status that a screen does not show in one line each."""
    absent = []
    source = DemoRuns(lambda: BEGIN + 20)
    for cluster in ("alpha", "beta"):
        runs = source.list_runs(every=False).runs
        for view in source.look(cluster, tuple(run for run, place in runs.items() if place == cluster)).views:
            lines = [line for line in screen.splitlines() if line.startswith(f" {view.run_id}")]
            if len(lines) != 1:
                absent.append(view.run_id)
                continue
            values = [cell for cell in cells(view) if cell != "-"]
            if width < 100 and view.attempt is not None:
                values.remove(str(view.attempt))
            absent += [value for value in values if value not in lines[0].split()]
            if width >= 200 and reason(view)[:20] not in lines[0]:
                absent.append(reason(view))
    return absent


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_the_table_says_the_same_as_status(size):
    async def act(pilot):
        # The title is painted before the rows, so the rows are waited for too.
        await until(pilot, "1 failed", lambda: not missing(shown(pilot.app), size[0]), absent="reading")

    play(demo_app(), act, size)


def test_a_row_stays_on_one_line_beside_a_scroll_bar():
    async def act(pilot):
        rows = pilot.app.screen.query_one("#runs", RowList)
        await until(pilot, lambda: rows.option_count == 5 and rows.show_vertical_scrollbar)
        assert rows.virtual_size.height == 5

    play(demo_app(), act, (200, 9))


def test_every_state_is_shown_with_its_reason_below_the_table():
    async def act(pilot):
        reasons = (
            "waiting for nodes (Resources)",
            "running",
            "the other ranks wait for rank 13 on g008 (phase forward and backward, iteration 1620)",
            "AcceleratorError: CUDA error: uncorrectable ECC error encountered",
            "completed at iteration 2000",
        )
        rows = pilot.app.screen.query_one("#runs", RowList)
        await until(pilot, lambda: rows.option_count == len(reasons))
        for number, words in enumerate(reasons):
            while rows.highlighted != number:
                await pilot.press("down")
            await until(pilot, lambda words=words: words in " ".join(shown(pilot.app).split()))

    play(demo_app(), act)


def test_a_demonstration_moves():
    moment = [0.0]
    app = app_of(DemoRuns(lambda: BEGIN + moment[0]))

    async def act(pilot):
        await until(pilot, "1 pending, 2 running")
        moment[0] = 45.0
        await until(pilot, "3 running", "building the kernels 25%")
        moment[0] = 700.0
        await until(pilot, "1 running, 3 completed, 1 failed")

    play(app, act)


def test_a_filter_is_typed_kept_and_forgotten():
    async def act(pilot):
        await until(pilot, "gpt-350m-c2a8")
        await pilot.press("slash", *"beta fail")
        screen = await until(pilot, "1 of 5 runs match 'beta fail'", "llama-8b-5d13", absent="gpt-350m-c2a8")
        assert "qwen" not in screen
        await pilot.press("enter", "enter")  # the first ends the typing, the second opens the run
        await until(pilot, "llama-8b-5d13  failed  on beta")
        await pilot.press("escape")
        await until(pilot, "1 of 5 runs match 'beta fail'")
        await pilot.press("escape")
        await until(pilot, "gpt-350m-c2a8", absent="match '")

    play(demo_app(), act)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_a_run_is_opened_and_each_key_shows_its_part(size):
    async def act(pilot):
        await open_run(pilot, "llama-8b-91c0")
        screen = await until(pilot, "llama-8b-91c0  running  on alpha", "validation", "2 ranks: 32")
        assert "iteration 3240/4000" in screen
        assert all(words in screen for words in ("tokens/s", "gradient norm", "memory", "•", "⠉"))
        await pilot.press("2")
        await until(pilot, "RANK NODE" if size[0] < 100 else "RANK  NODE", "cn101", "forward and backward")
        await pilot.press("3")
        screen = await until(pilot, "cn104", "training")
        assert [line.split()[:3] for line in screen.splitlines() if "cn10" in line] == [
            [f"cn10{number}", "8", "training"] for number in range(1, 5)
        ]
        await pilot.press("4")
        await until(pilot, "attempt 2", "attempt 1", "rank 21 (pp 0, dp 10, tp 1) on cn103: AcceleratorError")
        await pilot.press("5")
        await until(pilot, "5 log: rank 0", "3240/4000  loss 2.2688")
        await pilot.press("tab")
        await until(pilot, "validation")
        await pilot.press("shift+tab")
        await until(pilot, "3240/4000  loss 2.2688")
        await pilot.press("escape")
        await until(pilot, "5 runs:")
        await pilot.press("q")
        await until(pilot, lambda: not pilot.app.is_running)

    play(demo_app(), act, size)


def test_a_hanging_rank_is_first_and_marked_and_enter_opens_its_log():
    async def act(pilot):
        await open_run(pilot, "qwen-14b-07bf")
        await pilot.press("2")
        screen = await until(pilot, "! ")
        (first,) = (line for line in screen.splitlines() if "g008 forward and backward" in line)
        assert first.split()[:3] == ["!", "13", "g008"]
        assert screen.index(first) < screen.index(" 0 g007")
        await pilot.press("3")
        await until(pilot, "! g008")
        await pilot.press("2", "enter")
        await until(pilot, "no such log yet; d shows the usual one", absent="tok/s")
        await pilot.press("d")
        await until(pilot, "5 log: rank 0", "tok/s")

    play(demo_app(), act)


def test_the_log_of_the_failed_rank_is_one_key_away():
    async def act(pilot):
        await open_run(pilot, "llama-8b-5d13")
        await pilot.press("5")
        await until(pilot, "1375/4000")
        await pilot.press("f")
        await until(pilot, "5 log: rank 11", "torch.AcceleratorError: CUDA error", absent="grad")
        await pilot.press("2")
        await until(pilot, "!   11 g004")

    play(demo_app(), act)


class OneRun:
    """A source of one run, whose parts a test replaces."""

    def __init__(self, **changes: Any) -> None:
        self.demo = DemoRuns(lambda: BEGIN + 20)
        self.changes = changes

    def list_runs(self, *, every: bool) -> Listing:
        del every
        return Listing({"llama-8b-91c0": "alpha"})

    def look(self, cluster: str, run_ids: tuple[str, ...]) -> ClusterLook:
        (view,) = self.demo.look(cluster, run_ids).views
        return ClusterLook((replace(view, **self.changes),))

    def open_run(self, run_id: str) -> Any:
        self.opened = self.demo.open_run(run_id)
        return self

    def read(self, choice: Any) -> RunPage:
        page = self.opened.read(choice)
        return replace(page, view=replace(page.view, **self.changes))


def test_text_of_runs_hosts_and_logs_is_text_and_not_markup_or_escape_sequences():
    class Hostile(OneRun):
        def read(self, choice: Any) -> RunPage:
            page = super().read(choice)
            beats = tuple(replace(beat, host=HOSTILE, phase=HOSTILE) for beat in page.heartbeats)
            lines = tuple(replace(line, text=f"said {HARMLESS} [/]") for line in page.lines)
            attempts = tuple(replace(one, hosts=(HOSTILE,)) for one in page.attempts)
            return replace(page, heartbeats=beats, lines=lines, attempts=attempts, log=HOSTILE)

    source = Hostile(cluster=HOSTILE, detail=f"{HOSTILE} why\nso", hosts=(HOSTILE,), phase=HOSTILE)

    async def act(pilot):
        await until(pilot, f"running: {HARMLESS}[/] why so")
        await open_run(pilot, "llama-8b-91c0")
        await until(pilot, f"llama-8b-91c0  running  on {HARMLESS}[/]", f"log: {HARMLESS}[/]")
        for key, words in (("2", HARMLESS), ("3", HARMLESS), ("4", f"1 node: {HARMLESS}"), ("5", f"said {HARMLESS}")):
            await pilot.press(key)
            screen = await until(pilot, words)
            assert "\x1b" not in screen
            assert "title" not in screen

    play(app_of(source), act)


def test_a_source_that_raises_is_told_and_does_not_stop_the_others():
    class Broken(DemoRuns):
        is_broken = True

        def look(self, cluster: str, run_ids: tuple[str, ...]) -> ClusterLook:
            if cluster == "beta" and self.is_broken:
                raise SchedulerError("g000: [bold]no route[/] to host", transient=False)
            return super().look(cluster, run_ids)

        def open_run(self, run_id: str) -> Any:
            raise ZeroDivisionError(run_id)

    source = Broken(lambda: BEGIN + 20)

    async def act(pilot):
        await until(pilot, "beta: g000: [bold]no route[/] to host", "llama-8b-91c0", "2 runs: 1 pending, 1 running")
        await pilot.press("enter")
        await until(pilot, "internal error: ZeroDivisionError: moe-16x1b-4e2a")
        await pilot.press("escape")
        source.is_broken = False
        await until(pilot, "5 runs:", absent="no route")

    play(app_of(source), act)


def test_a_source_that_hangs_stops_neither_the_others_nor_the_keys_nor_the_end():
    answers = threading.Event()

    class Hanging(DemoRuns):
        def look(self, cluster: str, run_ids: tuple[str, ...]) -> ClusterLook:
            if cluster == "beta":
                answers.wait()
            return super().look(cluster, run_ids)

    async def act(pilot):
        await until(pilot, "beta: no answer for", "llama-8b-91c0", "reading 3")
        await open_run(pilot, "llama-8b-91c0")
        await until(pilot, "llama-8b-91c0  running  on alpha")
        await pilot.press("escape")
        await until(pilot, "beta: no answer for")
        await pilot.press("q")
        await until(pilot, lambda: not pilot.app.is_running)

    try:
        play(app_of(Hanging(lambda: BEGIN + 20), patience_s=0.1), act)
    finally:
        answers.set()


def test_a_cluster_out_of_reach_is_told_below_the_table():
    class Away(OneRun):
        def look(self, cluster: str, run_ids: tuple[str, ...]) -> ClusterLook:
            return replace(super().look(cluster, run_ids), problem="login1: timed out")

    async def act(pilot):
        await until(pilot, "alpha: login1: timed out", "llama-8b-91c0")

    play(app_of(Away()), act)


def test_no_runs_is_a_sentence():
    class Empty(OneRun):
        def list_runs(self, *, every: bool) -> Listing:
            return Listing({}, hidden=0 if every else 3)

    async def act(pilot):
        await until(pilot, "0 runs; 3 more ended", "no runs yet: llmctl submit starts one")
        await pilot.press("a", "r")
        await until(pilot, "0 runs", absent="more ended")
        await pilot.press("enter")  # opens nothing

    play(app_of(Empty()), act)


def test_a_resize_lays_everything_out_again():
    async def act(pilot):
        await until(pilot, "gpt-350m-c2a8")
        await pilot.resize_terminal(60, 20)
        screen = await until(pilot, absent="CLUSTER")
        assert "llama-8b-91c0" in screen
        await pilot.resize_terminal(140, 40)
        await until(pilot, "DETAIL", "CLUSTER")
        await open_run(pilot, "llama-8b-91c0")
        await pilot.press("5")
        await until(pilot, "3240/4000  loss 2.2688  grad")
        await pilot.resize_terminal(40, 20)
        await until(pilot, lambda: all(len(line) <= 40 for line in shown(pilot.app).splitlines()), "3240/4000")
        assert pilot.app.screen.query_one(LogView).max_scroll_x == 0
        await pilot.resize_terminal(20, 6)
        await pilot.press("1", "2", "3", "4", "1")
        await pilot.resize_terminal(80, 24)
        await until(pilot, "validation", "gradient norm")

    play(demo_app(), act)


def test_a_terminal_without_unicode_gets_ascii_only():
    async def act(pilot):
        await open_run(pilot, "llama-8b-91c0")
        screen = await until(pilot, "validation", "gradient norm")
        assert screen.isascii()
        for key in "2345":
            await pilot.press(key)
            assert (await until(pilot, "llama-8b-91c0")).isascii()

    play(demo_app(encoding="ascii"), act)


def test_no_color_leaves_no_colour_and_the_highlight_visible(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def act(pilot):
        await until(pilot, "gpt-350m-c2a8")
        # textual's picture has the default colours only: those of the text and of the background.
        picture = pilot.app.export_screenshot()
        fills = {part.split("}")[0].strip() for part in picture.split("fill: ")[1:] if "-r" in picture}
        assert len({fill.split(";")[0].strip(" }") for fill in fills}) <= 3, fills

    play(demo_app(), act)
