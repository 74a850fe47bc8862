"""The screen of one run."""

from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Footer, Static

from llmctl.durations import duration_text
from llmctl.runs.log_selection import LogChoice
from llmctl.runs.view_text import one_line
from llmctl.watch.poller import Poller
from llmctl.watch.source import OpenedRun, RunPage, Watching
from llmctl.watch.widgets import CurvesView, LogView, RowList
from llmctl.watch.words import MOST_RANKS, attempt_lines, head, node_table, rank_table

TABS = ("curves", "ranks", "nodes", "attempts", "log")


class RankList(RowList):
    """The ranks of the run."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "log of the rank", key_display="Enter")]


class RunScreen(Screen[None]):
    """One run: curves, ranks, nodes, attempts and the log that follows, one at a time."""

    AUTO_FOCUS = ""  # else the list of ranks, which is not shown at first, would get the keys
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"tab('{name}')", name, show=False) for number, name in enumerate(TABS, 1)),
        Binding("tab", "next_tab(1)", "or number: tab", key_display="Tab", priority=True),
        Binding("shift+tab", "next_tab(-1)", show=False, priority=True),
        Binding("f", "log('failed')", "failed ranks"),
        Binding("j", "log('job')", "job"),
        Binding("d", "log('')", "usual"),
        Binding("escape", "back", "back", key_display="Esc"),
        Binding("q", "app.quit", "quit"),
    ]

    class Read(Message):
        """A page, or the words of a failure."""

        def __init__(self, page: RunPage | None, problem: str) -> None:
            super().__init__()
            self.page, self.problem = page, problem

    class NewLog(Message):
        """The log begins again, with another choice."""

    def __init__(self, watching: Watching, run_id: str) -> None:
        super().__init__()
        self._watching = watching
        self._run_id = run_id
        self._opened: OpenedRun | None = None
        self._choice: LogChoice | None = None
        self._choice_of_lines: LogChoice | None = None
        self._page: RunPage | None = None
        self._problem = ""
        self._poller = Poller(self._read, self._tell, self._watching.interval_s)

    def compose(self) -> ComposeResult:
        """The parts, from top to bottom."""
        yield Static(Text(f"reading {one_line(self._run_id)}"), id="head", markup=False)
        yield Static(id="tabs", markup=False)
        with ContentSwitcher(initial="curves"):
            yield CurvesView(self._watching.encoding, id="curves")
            with Vertical(id="ranks"):
                yield Static(id="rank-header", markup=False)
                yield RankList(id="rank-rows")
            with VerticalScroll(id="nodes"):
                yield Static(id="node-rows", markup=False)
            with VerticalScroll(id="attempts"):
                yield Static(id="attempt-rows", markup=False)
            yield LogView(id="log")
        yield Static(id="notices", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to read."""
        self._show_tabs()
        self._show_notices()
        self._poller.start()
        self.set_interval(1.0, self._show_notices)

    def on_unmount(self) -> None:
        """End the thread."""
        self._poller.end()

    # Called in the thread.

    def _read(self) -> RunPage:
        if self._opened is None:
            self._opened = self._watching.source.open_run(self._run_id)
        choice = self._choice
        if choice != self._choice_of_lines:
            self._choice_of_lines = choice
            self.post_message(self.NewLog())
        return self._opened.read(choice)

    def _tell(self, page: RunPage | None, problem: str) -> None:
        self.post_message(self.Read(page, problem))

    # Called by the screen.

    @on(NewLog)
    def _begin_log(self) -> None:
        self.query_one(LogView).empty()

    @on(Read)
    def _take(self, message: Read) -> None:
        self._problem = message.problem
        if message.page is not None:
            page = self._page = message.page
            self.query_one(LogView).add(page.lines, has_prefix="," in page.log)
            self.query_one(CurvesView).show(page.curves, page.newest)
            self._show()
        self._show_notices()

    def _show(self) -> None:
        page = self._page
        if page is None:
            return
        width = self.size.width - 3  # padding and a scroll bar
        self.query_one("#head", Static).update(head(page.view))
        self._show_tabs()
        header, ranks, lines = rank_table(page, width)
        more = len(page.heartbeats) - MOST_RANKS
        if not page.heartbeats:
            header = Text("no heartbeat" + ("" if page.view.state.is_finished else " yet"))
        elif more > 0:
            header = Text.assemble(f"the first {MOST_RANKS} of {len(page.heartbeats)} ranks\n", header)
        self.query_one("#rank-header", Static).update(header)
        self.query_one("#rank-rows", RowList).show(ranks, lines)
        header, lines = node_table(page, width)
        nodes = Text("\n").join([header, *lines]) if lines else Text("no node yet")
        self.query_one("#node-rows", Static).update(nodes)
        self.query_one("#attempt-rows", Static).update(attempt_lines(page))

    def _show_tabs(self) -> None:
        current = self._tab
        line = Text(no_wrap=True)
        for number, name in enumerate(TABS, 1):
            label = f" {number} {self._label(name)} "
            line.append(label, "reverse bold" if name == current else "").append(" ")
        self.query_one("#tabs", Static).update(line)

    def _label(self, name: str) -> str:
        page = self._page
        if page is None:
            return name
        if name == "log":
            return f"log: {one_line(page.log)}" if page.log else "log"
        count = {"ranks": len(page.heartbeats), "attempts": len(page.attempts), "nodes": len(page.view.hosts)}.get(name)
        return f"{name}: {count}" if count else name

    def _show_notices(self) -> None:
        notices = [one_line(self._problem)] if self._problem else []
        if self._tab == "log" and self._page is not None and not self._page.log:
            notices.append("no such log yet; d shows the usual one")
        if self._poller.waits_s > self._watching.patience_s:
            notices.append(f"no answer for {duration_text(self._poller.waits_s)}")
        part = self.query_one("#notices", Static)
        part.update(Text("\n".join(notices), "yellow"))
        part.display = bool(notices)

    @property
    def _tab(self) -> str:
        return self.query_one(ContentSwitcher).current or TABS[0]

    def on_resize(self) -> None:
        """Lay out the tables again."""
        self._show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the keys of a tab only there."""
        del parameters
        if action == "log":
            return self._tab == "log"
        return True

    def action_tab(self, name: str) -> None:
        """Show a tab."""
        self.query_one(ContentSwitcher).current = name
        focus = {"ranks": "#rank-rows", "nodes": "#nodes", "attempts": "#attempts", "log": "#log"}.get(name)
        if focus is not None:
            self.query_one(focus).focus()
        else:
            self.set_focus(None)
        self._show_tabs()
        self._show_notices()
        self.refresh_bindings()

    def action_next_tab(self, step: int) -> None:
        """Show the next tab."""
        self.action_tab(TABS[(TABS.index(self._tab) + step) % len(TABS)])

    @on(RankList.OptionSelected)
    def _follow_rank(self) -> None:
        option = self.query_one("#rank-rows", RowList).highlighted_option
        if option is not None and option.id is not None:
            self._follow(LogChoice("ranks", (int(option.id),)))

    def action_log(self, kind: str) -> None:
        """Follow the logs of failed ranks, of the job, or those of ``llmctl logs``."""
        self._follow(LogChoice(kind) if kind else None)

    def _follow(self, choice: LogChoice | None) -> None:
        self._choice = choice
        self.action_tab("log")
        self._poller.ask()

    def action_back(self) -> None:
        """Leave the run."""
        self.app.pop_screen()
