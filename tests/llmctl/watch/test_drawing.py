"""Charts and tables of characters, and the follower of a growing file of metrics."""

import json
from unittest.mock import patch

from rich.text import Text
from textual.geometry import Size

from llmctl.runs.series.curves import Curve, Curves, RunCurves, run_curves
from llmctl.runs.series.following import HistoryFollower
from llmctl.runs.series.history import RunHistory
from llmctl.runs.series.reading import MetricsSource, read_histories
from llmctl.transport.file_reads import read_parts
from llmctl.watch.rows import Column, lay_out, shortened
from llmctl.watch.widgets import CurvesView


def charts_of(train: Curves, valid: Curves, size: tuple[int, int], encoding: str = "utf-8") -> list[Text]:
    drawn = CurvesView(encoding, id="curves")
    drawn.show(RunCurves(train, valid), {"lm_loss": 1.0})
    with patch.object(CurvesView, "size", Size(*size)):
        return list(drawn.render().split("\n"))


def curves(iterations: list[int], **of: Curve) -> Curves:
    unknown: list[float | None] = [None] * len(iterations)
    return Curves(iterations, unknown, unknown, of, len(iterations))


def test_curves_have_their_ranges_iterations_and_validations():
    values: list[float | None] = [8.0, 4.0, 2.0, 1.0]
    valid = curves([30], valid_loss=Curve([5.0], [5.0], [5.0]))
    lines = charts_of(curves([10, 20, 30, 40], lm_loss=Curve(values, values, values)), valid, (40, 12))
    text = "\n".join(line.plain for line in lines)
    assert all(label in text for label in ("7.500┤", "5.000┤", "2.500┤", "20", "40")), text
    assert lines[1].plain.startswith("     │⠠"), "the first and largest loss is not cut off"
    (point,) = (line for line in lines if "•" in line.plain)
    assert len(lines) == 11 and max(line.cell_len for line in lines) <= 40
    styles = {str(span.style) for span in point.spans if "•" in point.plain[span.start : span.end]}
    assert styles == {"color(11)"}, styles


def test_without_room_for_a_chart_there_are_numbers_alone():
    values: list[float | None] = [2.0, 1.0]
    train = curves([1, 2], lm_loss=Curve(values, values, values))
    assert [line.plain for line in charts_of(train, curves([]), (18, 12))] == ["loss 1.000"]
    assert [line.plain for line in charts_of(train, curves([]), (40, 5))] == ["loss 1.000"]


def test_a_terminal_without_unicode_has_ascii_alone():
    values: list[float | None] = [None, 2.0, 1.0]
    lines = charts_of(curves([1, 2, 3], lm_loss=Curve(values, values, values)), curves([]), (40, 12), "ascii")
    assert len(lines) == 11 and all(line.plain.isascii() for line in lines)


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
