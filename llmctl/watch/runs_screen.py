"""The screen of all runs."""

from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from llmctl.durations import duration_text
from llmctl.runs.view import RunView
from llmctl.runs.view_text import colour, one_line, page_rows
from llmctl.watch.poller import Poller
from llmctl.watch.run_screen import RunScreen
from llmctl.watch.source import ClusterLook, Listing, Watching
from llmctl.watch.widgets import RowList
from llmctl.watch.words import counts, matches, run_table

_LIST = "the list of runs"
_NO_RUNS = "no runs yet: llmctl submit starts one"


class FilterInput(Input):
    """Words that a shown run must have."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "keep the filter", key_display="Enter"),
        Binding("escape", "screen.leave", "no filter", key_display="Esc"),
    ]


class RunsScreen(Screen[None]):
    """All runs in a table, and the reason of the highlighted one.

    The list of runs is read by one thread, and the runs of each cluster by another one.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("a", "every", "all or recent"),
        Binding("r", "read", "refresh"),
        Binding("escape", "leave", show=False),
        Binding("q", "app.quit", "quit"),
    ]

    class Listed(Message):
        """The list of runs, or the words of a failure."""

        def __init__(self, listing: Listing | None, problem: str) -> None:
            super().__init__()
            self.listing, self.problem = listing, problem

    class Looked(Message):
        """The runs of one cluster, or the words of a failure."""

        def __init__(self, cluster: str, look: ClusterLook | None, problem: str) -> None:
            super().__init__()
            self.cluster, self.look, self.problem = cluster, look, problem

    def __init__(self, watching: Watching) -> None:
        super().__init__()
        self._watching = watching
        self._listing: Listing | None = None
        self._views: dict[str, RunView] = {}
        self._problems: dict[str, str] = {}
        self._every = False
        self._words = ""
        self._list = Poller(self._read_list, self._tell_list, self._watching.interval_s)
        self._clusters: dict[str, Poller[ClusterLook]] = {}

    def compose(self) -> ComposeResult:
        """The parts, from top to bottom."""
        yield Static("reading the runs", id="title", markup=False)
        yield Static(id="header", markup=False)
        yield RowList(id="runs")
        yield Static(id="about", markup=False)
        yield Static(id="notices", markup=False)
        yield FilterInput(placeholder="words in run, cluster, state or reason", id="filter", compact=True)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to read."""
        self.query_one(Input).display = False
        self.query_one(RowList).focus()
        self._list.start()
        self.set_interval(1.0, self._show_notices)

    @property
    def _pollers(self) -> "dict[str, Poller[Listing] | Poller[ClusterLook]]":
        return {_LIST: self._list, **self._clusters}

    def on_screen_suspend(self) -> None:
        """Rest while the page of a run is open, which reads by itself."""
        for poller in self._pollers.values():
            poller.pause()

    def on_screen_resume(self) -> None:
        """Go on."""
        for poller in self._pollers.values():
            poller.start()

    def on_unmount(self) -> None:
        """End the threads."""
        for poller in self._pollers.values():
            poller.end()

    # Called in the threads.

    def _read_list(self) -> Listing:
        return self._watching.source.list_runs(every=self._every)

    def _tell_list(self, listing: Listing | None, problem: str) -> None:
        self.post_message(self.Listed(listing, problem))

    # Called by the screen.

    @on(Listed)
    def _take_list(self, message: Listed) -> None:
        self._problems[_LIST] = message.problem
        if message.listing is not None:
            self._listing = message.listing
            for cluster in message.listing.runs.values():
                if cluster not in self._clusters:
                    self._clusters[cluster] = self._poller_of(cluster)
                    self._clusters[cluster].start()
        self.show()

    def _poller_of(self, cluster: str) -> Poller[ClusterLook]:
        def read() -> ClusterLook:
            runs = self._listing.runs if self._listing is not None else {}
            return self._watching.source.look(cluster, tuple(run for run, place in runs.items() if place == cluster))

        def tell(look: ClusterLook | None, problem: str) -> None:
            self.post_message(self.Looked(cluster, look, problem))

        return Poller(read, tell, self._watching.interval_s)

    @on(Looked)
    def _take_look(self, message: Looked) -> None:
        look = message.look
        self._problems[message.cluster] = look.problem if look is not None else message.problem
        if look is not None:
            self._views.update((view.run_id, view) for view in look.views)
        self.show()

    def show(self) -> None:
        """Show what is known now."""
        if self._listing is None or not self.is_mounted:
            self._show_notices()
            return
        known = [view for run_id in self._listing.runs if (view := self._views.get(run_id)) is not None]
        views = [view for view in known if matches(view, self._words)]
        header, lines = run_table(views, self.size.width - 2)
        missing = len(self._listing.runs) - len(known)
        title = Text.assemble(("llmctl watch", "bold"), "  ")
        if self._words:
            title.append(f"{len(views)} of {len(known)} runs match {self._words!r}", "yellow")
        else:
            title.append(counts(known, self._listing.hidden) + (f"; reading {missing}" if missing else ""))
        self.query_one("#title", Static).update(title)
        self.query_one("#header", Static).update(header if views else Text(_NO_RUNS if not self._listing.runs else ""))
        self.query_one(RowList).show([view.run_id for view in views], lines)
        self._show_about()
        self._show_notices()

    def _show_about(self) -> None:
        view = self._highlighted()
        about = Text()
        if view is not None:
            about.append(one_line(view.summary), colour(view.state))
            for name, line in page_rows(view, self._watching.encoding):
                about.append(f"\n{name:<12}", "dim").append(line)
        self.query_one("#about", Static).update(about)

    def _show_notices(self) -> None:
        notices = [f"{name}: {one_line(problem)}" for name, problem in self._problems.items() if problem]
        for name, poller in self._pollers.items():
            if poller.waits_s > self._watching.patience_s:
                notices.append(f"{one_line(name)}: no answer for {duration_text(poller.waits_s)}")
        part = self.query_one("#notices", Static)
        part.update(Text("\n".join(notices), "yellow"))
        part.display = bool(notices)

    def _highlighted(self) -> RunView | None:
        option = self.query_one(RowList).highlighted_option
        return self._views.get(option.id or "") if option is not None else None

    def on_resize(self) -> None:
        """Lay out the table again."""
        self.show()

    @on(RowList.OptionHighlighted)
    def _move(self) -> None:
        self._show_about()

    @on(RowList.OptionSelected)
    def _open(self) -> None:
        view = self._highlighted()
        if view is not None:
            self.app.push_screen(RunScreen(self._watching, view.run_id))

    def action_every(self) -> None:
        """Show all runs, or only the recent ones."""
        self._every = not self._every
        self._list.ask()

    def action_read(self) -> None:
        """Read again at once."""
        for poller in self._pollers.values():
            poller.ask()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of the table are letters while a filter is typed."""
        del parameters
        return not (isinstance(self.focused, Input) and action in ("filter", "every", "read", "app.quit"))

    def action_filter(self) -> None:
        """Type a filter."""
        part = self.query_one(Input)
        part.display = True
        part.focus()

    def action_leave(self) -> None:
        """Forget the filter."""
        self.query_one(Input).value = ""
        self._end_filter()

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        self._words = event.value
        self.show()

    @on(Input.Submitted)
    def _end_filter(self, event: Any = None) -> None:
        del event
        self.query_one(Input).display = False
        self.query_one(RowList).focus()
