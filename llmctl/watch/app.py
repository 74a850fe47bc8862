"""The live screen of runs as a textual program."""

from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from llmctl.runs.number_text import is_utf8
from llmctl.watch.run_screen import RunScreen
from llmctl.watch.runs_screen import RunsScreen
from llmctl.watch.source import Watching


class WatchApp(App[None]):
    """Shows the runs of a source until the user quits. The colours are those of the terminal itself."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", show=False, priority=True)]
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    #title, #tabs { height: 1; padding: 0 1; }
    #tabs { margin: 1 0; }
    #head { height: auto; max-height: 6; padding: 0 1; }
    #header { height: 1; padding: 0 1; margin: 1 0 0 0; }
    #about { height: auto; max-height: 9; padding: 0 1; margin: 1 0 0 0; }
    #notices { height: auto; max-height: 4; padding: 0 1; }
    #filter { padding: 0 1; background: ansi_default; border: none; height: 1; }
    RowList, LogView { background: ansi_default; border: none; padding: 0; }
    RowList:focus, LogView:focus { border: none; background-tint: ansi_default 0%; }
    RowList { height: auto; scrollbar-gutter: auto; text-wrap: nowrap; text-overflow: clip; }
    #runs { height: auto; max-height: 60%; }
    RowList > .option-list--option { padding: 0 1; }
    RowList > .option-list--option-highlighted, RowList:focus > .option-list--option-highlighted {
        background: ansi_default; color: ansi_default; text-style: reverse;
    }
    RowList > .option-list--option-hover { background: ansi_default; }
    ContentSwitcher { height: 1fr; }
    CurvesView, LogView { height: 1fr; padding: 0 1; }
    #rank-header, #node-rows, #attempt-rows { padding: 0 1; height: auto; }
    #rank-rows { height: 1fr; }
    * {
        scrollbar-size: 0 1; scrollbar-color: ansi_bright_black; scrollbar-color-hover: ansi_bright_black;
        scrollbar-color-active: ansi_bright_black; scrollbar-background: ansi_default;
        scrollbar-background-hover: ansi_default; scrollbar-background-active: ansi_default;
    }
    Footer { background: ansi_default; color: ansi_default; }
    FooterKey { background: ansi_default; color: ansi_default; }
    FooterKey .footer-key--key { background: ansi_default; color: ansi_cyan; text-style: bold; }
    FooterKey .footer-key--description { background: ansi_default; color: ansi_default; }
    WatchApp.-ascii * { scrollbar-size: 0 0; }
    """

    def __init__(self, watching: Watching, run_id: str | None = None) -> None:
        """Show the runs of a source; with ``run_id``, open this one at once."""
        super().__init__(ansi_color=True)
        self._watching = watching
        self._first = run_id
        self.title = "llmctl watch"

    def on_mount(self) -> None:
        """Open the first screen."""
        self.theme = "ansi-dark"
        self.set_class(not is_utf8(self._watching.encoding), "-ascii")
        self.push_screen(RunsScreen(self._watching))
        if self._first is not None:
            self.push_screen(RunScreen(self._watching, self._first))
