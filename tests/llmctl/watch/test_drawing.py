"""Charts and tables of characters, and the follower of a growing file of metrics."""

import json

import pytest
from rich.text import Text

from llmctl.runs.series.curves import Curve, run_curves
from llmctl.runs.series.following import HistoryFollower
from llmctl.runs.series.history import RunHistory
from llmctl.runs.series.reading import MetricsSource, read_histories
from llmctl.transport.file_reads import read_parts
from llmctl.watch.chart import LINE, SPREAD, Chart
from llmctl.watch.rows import Column, lay_out, shortened


def plain(chart: Chart, width: int = 40, height: int = 10, encoding: str = "utf-8") -> list[str]:
    return [line.plain for line in chart.draw(width, height, encoding)]


def test_a_chart_names_its_range_and_its_iterations():
    values = [8.0, 4.0, 2.0, 1.0]
    lines = plain(Chart([10, 20, 30, 40], Curve(values, values, values), "{:.1f}".format, [30], [5.0]))
    assert lines[0].startswith("8.0 │") and lines[-2].startswith("1.0 │") and lines[4].startswith("4.5 │")
    assert lines[-1].startswith("    └10─") and lines[-1].endswith("40")
    assert sum(line.count("●") for line in lines) == 1
    assert len(lines) == 10 and max(map(len, lines)) == 40


def test_the_line_goes_through_the_means_and_dim_dots_reach_to_the_extremes():
    curve = Curve([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 9.0, 1.0])
    lines = Chart([1, 2, 3], curve, str).draw(40, 10, "utf-8")
    styles = {str(span.style) for line in lines for span in line.spans if line.plain[span.start : span.end].strip()}
    assert {LINE, SPREAD} <= styles
    top = lines[0].plain[5:]
    assert top.strip(), "the spike is seen"
    flat = plain(Chart([1, 2, 3], Curve(*[[1.0, 1.0, 1.0]] * 3), str))
    assert not flat[0][5:].strip(), "without it there is nothing"


@pytest.mark.parametrize(
    "values",
    [[None, 3.0, None], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [-1e308, 0.0, 1e308], [1e-300, 2e-300, 3e-300]],
)
def test_odd_numbers_are_drawn(values):
    for encoding in ("utf-8", "ascii"):
        lines = plain(Chart([1, 2, 3], Curve(values, values, values), "{:.3g}".format), encoding=encoding)
        assert len(lines) == 10
        assert encoding == "utf-8" or "".join(lines).isascii()


@pytest.mark.parametrize("size", [(0, 0), (5, 3), (10, 2), (12, 1)])
def test_without_room_there_is_no_chart(size):
    assert plain(Chart([1, 2], Curve(*[[1.0, 2.0]] * 3), str), *size) == []


COLUMNS = (
    Column("RUN"),
    Column("N", is_number=True, leaves=2),
    Column("EMPTY", leaves=3),
    Column("WHY", leaves=1, fills=True),
)


def table(width: int) -> list[str]:
    rows = [
        [Text("first"), Text("1"), Text("-"), Text("a reason of many words")],
        [Text("日本"), Text("22"), Text(), Text()],
    ]
    header, lines = lay_out(COLUMNS, rows, width)
    return [header.plain.rstrip(), *(line.plain.rstrip() for line in lines)]


def test_columns_leave_in_their_order_where_there_is_no_room():
    assert table(60) == ["RUN    N WHY", "first  1 a reason of many words", "日本  22"]
    assert table(25) == ["RUN    N WHY", "first  1 a reason of m...", "日本  22"]
    assert table(12) == ["RUN    N", "first  1", "日本  22"]
    assert table(6) == ["RUN", "first", "日本"]


def test_a_text_that_is_too_long_ends_in_dots():
    assert shortened(Text("abcdefgh"), 8).plain == "abcdefgh"
    assert shortened(Text("abcdefghi"), 8).plain == "abcde..."
    assert shortened(Text("abc"), 2).plain == ".."


def test_a_growing_file_gives_the_same_history_as_a_whole_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"iteration": step, "attempt": 1, "lm_loss": 1.0 / step, "time": float(step)} for step in range(1, 30)]
    rows[20:] = [{**row, "iteration": row["iteration"] - 10, "attempt": 2} for row in rows[20:]]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    follower = HistoryFollower(str(path), read_parts, ["lm_loss"])
    assert not follower.poll()
    for end in (5, 100, 101, len(text) - 3, len(text)):
        path.write_bytes(text[:end])
        follower.poll()
    (whole,) = read_histories([MetricsSource(str(path), read_parts)], ["lm_loss"])
    assert follower.history == whole
    assert not follower.poll()
    path.write_bytes(text[: text.index(b"\n") + 1])  # replaced by a shorter file
    assert follower.poll()
    assert run_curves(follower.history).train.iteration == [1]
    assert isinstance(follower.history, RunHistory)
