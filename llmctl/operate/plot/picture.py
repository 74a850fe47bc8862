"""Charts as one SVG, PNG or PDF, by matplotlib. Needs the package matplotlib."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from llmctl.operate.plot.charts import Chart

FORMATS = ("svg", "png", "pdf")
MARK = b"llmctl plot"
"""In the metadata of every picture."""
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Colours that people with a colour vision deficiency tell apart (Okabe and Ito, 2008)."""
_WIDTH, _HEIGHT = 8.0, 4.0
"""Inches of one chart."""


def picture(charts: Sequence[Chart], form: str) -> bytes:
    """The charts below each other. The same charts give the same bytes.

    A line stands for the mean of the rows of each point, the shade behind it for their smallest and largest numbers.

    Args:
        charts: at least one.
        form: one of ``FORMATS``.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text in SVG, with ids that do not change from call to call; a name with "$" is not a formula.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "llmctl", "text.parse_math": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(charts)), layout="constrained")
        for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
            for line in chart.lines:
                colour = _COLOURS[line.run % len(_COLOURS)]
                if line.low:
                    axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
                style = (
                    {"marker": "o", "linestyle": "none", "markersize": 4.0} if line.is_sparse else {"linewidth": 1.2}
                )
                axes.plot(line.x, line.y, color=colour, label=line.name, **style)
            axes.set(xlabel=chart.x_label, ylabel=chart.key, yscale="log" if chart.is_log else "linear")
            axes.grid(visible=True, alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
        written = BytesIO()
        figure.savefig(written, format=form, dpi=150, metadata=_metadata(form))
    return written.getvalue()


def _metadata(form: str) -> dict[str, str | None]:
    mark = MARK.decode()
    if form == "png":
        return {"Software": mark}
    return {"Creator": mark, "Date": None} if form == "svg" else {"Creator": mark, "CreationDate": None}
