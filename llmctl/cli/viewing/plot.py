"""``llmctl plot``: numbers of runs as a plot in the terminal, or as a file."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.completion import complete_run
from llmctl.context import Context
from llmctl.errors import UsageError

if TYPE_CHECKING:
    from llmctl.operate.plot.charts import Chart

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_POINTS = 1000
_PIPE_COLUMNS, _MOST_ROWS = 80, 20


@app.command()
def plot(
    ctx: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Run id, its beginning, run name or job id.", autocompletion=complete_run),
    ],
    keys: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="KEY", help="Key of metrics.jsonl; repeatable. Default: lm_loss."),
    ] = None,
    axis: Annotated[
        str, typer.Option("--over", metavar="AXIS", help="The x axis: iteration, tokens or time. Default: iteration.")
    ] = "iteration",
    is_log: Annotated[bool, typer.Option("--log", help="Logarithmic scale.")] = False,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="A picture, .svg, .png or .pdf, instead of text.")
    ] = None,
) -> None:
    """Plot numbers of runs in the terminal, or into a file.

    A picture of an earlier plot is replaced, any other file never.
    """
    from llmctl.operate.plot.charts import AXES, LOSS, charts
    from llmctl.operate.plot.histories import check_keys, read_runs

    if axis not in AXES:
        raise UsageError(f"--over {axis}: is none of {', '.join(AXES)}")
    context: Context = ctx.obj
    wanted = list(dict.fromkeys(keys or [LOSS]))
    target = _target(context, output)
    entries = list(dict.fromkeys(context.index.find(name) for name in runs))
    width, height = _size()
    histories = read_runs(context, entries, wanted)
    most = _POINTS if target is not None else 2 * width
    found = charts(histories, wanted, axis, is_log=is_log, most=most)
    check_keys(context, entries, wanted, histories, found)
    if target is None:
        _print(found, width, height, context)
        return
    from llmctl.cli.viewing.replaced_file import replace_file
    from llmctl.operate.plot.picture import picture

    replace_file(target, picture(found, target.suffix[1:].lower()))
    print(output)


def _target(context: Context, output: str | None) -> Path | None:
    """The file to write; refused before any run is read."""
    if output is None:
        return None
    from llmctl.cli.viewing.replaced_file import check_ours
    from llmctl.operate.plot.picture import FORMATS, MARK

    target = context.cwd / Path(output).expanduser()
    if target.suffix[1:].lower() not in FORMATS:
        raise UsageError(f"--output {output}: give a name that ends in {', '.join(f'.{form}' for form in FORMATS)}")
    if find_spec("matplotlib") is None:
        raise UsageError("--output: needs the package matplotlib; install it: pip install matplotlib")
    check_ours(target, MARK, "a picture of llmctl plot")
    return target


def _size() -> tuple[int, int]:
    """Columns and rows of one chart."""
    if not sys.stdout.isatty():
        return _PIPE_COLUMNS, _MOST_ROWS
    columns, rows = shutil.get_terminal_size()
    return columns, min(_MOST_ROWS, rows - 2)


def _print(found: "list[Chart]", width: int, height: int, context: Context) -> None:
    from llmctl.operate.plot.terminal import chart_text
    from llmctl.runs.number_text import is_utf8

    colour = sys.stdout.isatty() and not context.environment.get("NO_COLOR")
    unicode = is_utf8(sys.stdout.encoding)
    print("\n\n".join(chart_text(chart, width, height, colour=colour, unicode=unicode) for chart in found))
