"""Parts of the screens: a list of rows, curves, and a log."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.style import Style
from textual.widget import Widget
from textual.widgets import OptionList, RichLog
from textual.widgets.option_list import Option

from llmctl.operate.plot.charts import Chart, Line, curve_line
from llmctl.operate.plot.terminal import COLOURS, draw_lines
from llmctl.runs.logs import LogLine
from llmctl.runs.number_text import is_utf8, loss_text, memory_text, rate_text, sparkline
from llmctl.runs.series.curves import Curves, RunCurves

MOST_LINES = 5000
"""Lines of a log that can be scrolled back to."""
LINE, POINT = COLOURS[0][1], COLOURS[1][1]
_LEAST = (20, 4)
"""Columns and rows from which a chart can be read."""
_ROOM_FOR_CHARTS = (90, 20)
"""Columns and rows from which each number has a chart of its own; else it has one line."""


class RowList(OptionList):
    """Rows of which one is highlighted. The highlight stays on its row when rows come and go."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "open", key_display="Enter")]

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, markup=False)

    def get_visual_style(self, *component_classes: str, partial: bool = False) -> Style:
        """The style of a part; the highlighted row is reversed, which every terminal shows.

        Styles of textual 8 lose this property.
        """
        style = super().get_visual_style(*component_classes, partial=partial)
        return style + Style(reverse=True) if "option-list--option-highlighted" in component_classes else style

    def show(self, ids: Sequence[str], lines: Sequence[Text]) -> None:
        """Show these rows.

        Args:
            ids: distinct names of the rows.
            lines: one line each.
        """
        if ids == [option.id for option in self.options]:
            for index, line in enumerate(lines):
                if self.get_option_at_index(index).prompt != line:
                    self.replace_option_prompt_at_index(index, line)
            return
        before = self.highlighted_option.id if self.highlighted_option is not None else None
        self.set_options(Option(line, id=one) for one, line in zip(ids, lines, strict=True))
        if ids:
            self.highlighted = ids.index(before) if before in ids else 0


class CurvesView(Widget):
    """The curves of a run: its loss with the validations, and below it speed, gradient norm and memory."""

    def __init__(self, encoding: str | None, *, id: str) -> None:
        super().__init__(id=id)
        self._encoding = encoding
        self._curves: RunCurves | None = None
        self._newest: dict[str, float] = {}

    def show(self, curves: RunCurves, newest: dict[str, float]) -> None:
        """Show these curves, and beside them the newest numbers."""
        if curves is not self._curves:
            self._curves, self._newest = curves, newest
            self.refresh()

    def render(self) -> Text:
        """All lines, for the present size."""
        width, height = self.size
        if self._curves is None or not self._curves.train.iteration:
            return Text("no metrics yet")
        train, valid = self._curves.train, self._curves.valid
        below = self._charts(train, width) if width >= _ROOM_FOR_CHARTS[0] and height >= _ROOM_FOR_CHARTS[1] else None
        below = below or self._sparklines(train, width)
        lines = [self._legend()]
        drawn = (curve_line("loss", 0, "lm_loss", train), curve_line("validation", 1, "valid_loss", valid))
        lines += self._chart("lm_loss", drawn, loss_text, (width, height - len(lines) - len(below)))
        return Text("\n", no_wrap=True).join([*lines, *below])

    def _legend(self) -> Text:
        legend = Text.assemble(("loss ", "bold"), (self._number("lm_loss", loss_text), LINE))
        if "valid_loss" in self._newest:
            legend.append("   validation ", "bold").append(self._number("valid_loss", loss_text), POINT)
        return legend

    def _number(self, key: str, text: Callable[[float], str]) -> str:
        return text(self._newest[key]) if key in self._newest else "-"

    def _charts(self, train: Curves, width: int) -> list[Text]:
        each, rows = width // 3 - 2, 8
        parts = []
        for name, key, text in _NUMBERS:
            title = Text.assemble((f"{name} ", "bold"), (self._number(key, text), LINE))
            drawn = self._chart(key, [curve_line(name, 0, key, train)], text, (each, rows))
            parts.append([title, *drawn, *([Text()] * (rows - len(drawn)))])
        lines = [Text()]
        for row in zip(*parts, strict=True):
            line = Text(no_wrap=True)
            for cell in row:
                padded = cell.copy()
                padded.truncate(each, pad=True)
                line.append_text(padded).append("   ")
            lines.append(line)
        return lines

    def _chart(
        self, key: str, lines: Sequence[Line | None], text: Callable[[float], str], size: tuple[int, int]
    ) -> list[Text]:
        """Lines of a chart of the key over the iterations; empty without numbers or room."""
        known = [line for line in lines if line is not None]
        if not known or size[0] < _LEAST[0] or size[1] < _LEAST[1]:
            return []
        has_braille = is_utf8(self._encoding)
        drawn = draw_lines(
            Chart(key, "iteration", known),
            *size,
            colour=True,
            unicode=has_braille,
            by_mark=not has_braille,
            labels=lambda values: [text(value) for value in values],
        )
        return [Text.from_ansi(line) for line in drawn]

    def _sparklines(self, train: Curves, width: int) -> list[Text]:
        lines = [Text()]
        for name, key, text in _NUMBERS:
            curve = train.of.get(key)
            if curve is None:
                continue
            room = max(8, min(60, width - 34))
            line = sparkline(_fewer(curve.mean, room), encoding=self._encoding)
            lines.append(Text.assemble((f"{name:<14}", "bold"), (line, LINE), "  ", self._number(key, text)))
        return lines


_NUMBERS = (
    ("tokens/s", "tokens_per_s", rate_text),
    ("gradient norm", "grad_norm", "{:.3g}".format),
    ("memory", "peak_memory_bytes", memory_text),
)


def _fewer(values: Sequence[float | None], most: int) -> list[float | None]:
    """At most this many means of neighbours."""
    size = max(1, -(-len(values) // most))
    groups = [values[begin : begin + size] for begin in range(0, len(values), size)]
    known = [[value for value in group if value is not None] for group in groups]
    return [sum(value / len(group) for value in group) if group else None for group in known]


class LogView(RichLog):
    """Lines of a log, wrapped for the width. It follows the end unless the user has scrolled back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("end", "scroll_end", show=False),
        Binding("home", "scroll_home", show=False),
    ]

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, max_lines=MOST_LINES, wrap=True, markup=False, highlight=False, min_width=1)
        self._kept: deque[Text] = deque(maxlen=MOST_LINES)
        self._wrapped_for = 0

    def add(self, lines: Sequence[LogLine], *, has_prefix: bool) -> None:
        """Add lines, which are already cleaned of control characters."""
        follows = self.is_vertical_scroll_end
        for line in lines:
            text = Text((str(line) if has_prefix else line.text).expandtabs())
            self._kept.append(text)
            self.write(text, scroll_end=follows)

    def empty(self) -> None:
        """Forget all lines."""
        self._kept.clear()
        self.clear()

    def on_resize(self, event: events.Resize) -> None:
        """Wrap the lines again for another width."""
        if event.size.width not in (0, self._wrapped_for) and self._wrapped_for:
            follows = self.is_vertical_scroll_end
            self.clear()
            for text in self._kept:
                self.write(text, scroll_end=follows)
        self._wrapped_for = event.size.width or self._wrapped_for
