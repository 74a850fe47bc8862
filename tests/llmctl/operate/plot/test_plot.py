"""Charts of runs as text and as pictures."""

import json
import math
import re
from dataclasses import replace
from io import BytesIO
from xml.etree import ElementTree

import pytest

from llmctl.operate.plot.charts import Chart, Line, charts
from llmctl.operate.plot.terminal import chart_text, draw_lines
from llmctl.operate.plot.ticks import log_ticks, round_ticks, tick_labels
from llmctl.runs.series.columns import parse_columns
from llmctl.runs.series.history import RunHistory

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def history(rows):
    found = RunHistory()
    found.add(parse_columns("".join(json.dumps(row) + "\n" for row in rows).encode(), ["*"]))
    return found


def training(iterations, loss, **more):
    """Rows with a step each 30 s, of 1000 tokens."""
    return [
        {"iteration": step, "attempt": 1, "lm_loss": loss(step), "consumed_tokens": 1000 * step, "time": 30.0 * step}
        | {key: make(step) for key, make in more.items()}
        for step in range(1, iterations + 1)
    ]


def one(runs, key="lm_loss", axis="iteration", *, is_log=False, most=1000):
    (chart,) = charts({name: history(rows) for name, rows in runs.items()}, [key], axis, is_log=is_log, most=most)
    return chart


@pytest.mark.parametrize(
    ("axis", "label", "x"),
    [
        ("iteration", "iteration", [1, 2, 3]),
        ("tokens", "tokens", [1000, 2000, 3000]),
        ("time", "seconds since the first step", [0, 30, 60]),
    ],
)
def test_a_line_has_the_numbers_of_the_run_over_each_axis(axis, label, x):
    chart = one({"a": training(3, lambda step: 9.0 - step)}, axis=axis)
    assert (chart.x_label, chart.lines[0].x, chart.lines[0].y) == (label, x, [8.0, 7.0, 6.0])


@pytest.mark.parametrize(
    ("steps", "unit", "last"), [(7, "minutes", 3.0), (300, "hours", 299 / 120), (6000, "days", None)]
)
def test_the_unit_of_time_suits_the_longest_run(steps, unit, last):
    chart = one({"short": training(2, float), "long": training(steps, float)}, axis="time", most=10_000)
    assert chart.x_label == f"{unit} since the first step"
    assert last is None or chart.lines[1].x[-1] == pytest.approx(last)


def test_the_loss_has_its_validations_and_a_run_keeps_its_number():
    rows = training(4, float)
    rows.insert(2, {"iteration": 2, "attempt": 1, "valid_loss": 7.5, "time": 61.0})
    chart = one({"first": training(4, float), "second": rows}, axis="tokens")
    assert [(line.name, line.run, line.is_sparse) for line in chart.lines] == [
        ("first", 0, False),
        ("second", 1, False),
        ("second, validation", 1, True),
    ]
    assert (chart.lines[2].x, chart.lines[2].y) == ([2000], [7.5])


def test_numbers_that_are_absent_leave_no_point_and_a_spike_stays_in_the_envelope():
    loss = {5: None, 6: 100.0}
    chart = one({"a": training(20, lambda step: loss.get(step, 1.0))}, most=5)
    (line,) = chart.lines
    assert len(line.x) == 5 and max(line.high) == 100.0 and min(line.low) == 1.0 and all(map(math.isfinite, line.y))
    every = one({"a": training(20, lambda step: loss.get(step, 1.0))}).lines[0]
    assert 5 not in every.x and every.low == every.high == []


def test_a_logarithmic_scale_has_positive_numbers_alone():
    chart = one({"a": training(4, lambda step: step - 2)}, is_log=True)
    assert chart.lines[0].y == [1.0, 2.0]
    assert charts({"a": history(training(3, lambda step: -step))}, ["lm_loss"], "iteration", is_log=True, most=9) == []


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("unicode", [False, True])
@pytest.mark.parametrize("is_log", [False, True])
def test_text_fits_and_has_names_ticks_and_a_falling_line(colour, unicode, is_log):
    runs = {"run-a": training(100, lambda step: 1000.0 / step), "run-b": training(50, lambda step: 900.0 / step)}
    text = chart_text(one(runs, is_log=is_log), 60, 16, colour=colour, unicode=unicode)
    bare = ESCAPE.sub("", text)
    lines = bare.splitlines()
    assert (text != bare) == colour and bare.isascii() == (not unicode)
    assert len(lines) == 16 and max(map(len, lines)) <= 60
    assert lines[0] == "lm_loss over iteration" + (", logarithmic" if is_log else "")
    assert "run-a" in lines[1] and "run-b" in lines[1] and "100" in lines[-1]
    plot = [re.sub(r"^.*?[│┤|]", "", line) for line in lines[2:-2]]
    drawn = [[place for place, mark in enumerate(line) if mark != " "] for line in plot]
    # The line falls: the higher a row of the plot, the further left its marks begin.
    starts = [places[0] for places in drawn if places]
    assert starts == sorted(starts) and len(starts) > 5


def test_two_runs_without_colour_have_marks_of_their_own():
    runs = {"a": training(9, float), "b": training(9, lambda step: 10.0 - step)}
    text = chart_text(one(runs), 60, 16, colour=False, unicode=True)
    assert text.splitlines()[1] == "* a  + b" and text.count("*") > 3 and text.count("+") > 3


@pytest.mark.parametrize(
    "rows", [training(1, float), training(9, lambda _: 3.0), training(3, lambda step: 1e300 * step)]
)
def test_one_point_a_constant_and_huge_numbers_are_drawn(rows):
    assert "lm_loss" in chart_text(one({"a": rows}), 10, 3, colour=False, unicode=True)


def test_the_lines_reach_beyond_the_outermost_ticks():
    line = Line("run", 0, [10.0, 20.0, 30.0, 40.0], [8.0, 4.0, 2.0, 1.0], [], [])
    drawn = draw_lines(Chart("k", "iteration", [line]), 40, 11, colour=False, unicode=True, by_mark=False)
    assert drawn[0].startswith("   │⠠") and drawn[1].startswith("7.5┤"), drawn
    assert drawn[-3].startswith("   │") and drawn[-3].endswith("⠂"), drawn
    assert drawn[-1].split() == ["20", "40"] and drawn[-1].index("20") == 16, drawn


def test_a_chart_is_as_wide_as_asked_even_if_the_terminal_is_smaller(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    line = Line("run", 0, [1.0, 2.0], [1.0, 2.0], [], [])
    drawn = draw_lines(Chart("k", "iteration", [line]), 150, 60, colour=False, unicode=True, by_mark=False)
    assert len(drawn) == 60 and max(map(len, drawn)) == 150


def test_dim_dots_of_one_run_reach_to_the_extremes():
    line = Line("run", 0, [1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 9.0, 1.0])

    def drawn(*lines, **how):
        return draw_lines(Chart("lm_loss", "iteration", list(lines)), 40, 10, unicode=True, by_mark=False, **how)

    dim = "\x1b[38;5;8m"
    assert any(dim in text for text in drawn(line, colour=True)[:3]), "the spike is seen"
    other = replace(line, name="other", run=1)
    assert not any(dim in text for text in [*drawn(line, other, colour=True), *drawn(line, colour=False)])


def test_a_hostile_name_draws_no_escape_sequence():
    name = "a\x1b]0;title\x07\x1b[2J"
    text = chart_text(one({name: training(3, float)}), 80, 10, colour=False, unicode=True)
    assert "\x1b" not in text and "\x07" not in text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2.5, 5, 7.5, 10]), (0.97, 1.03, [0.98, 1.0, 1.02]), (-3, 3, [-2, 0, 2]), (5, 5, [5]), (0, 1e9, None)],
)
def test_ticks_are_round_numbers(low, high, ticks):
    found = round_ticks(low, high, 5)
    assert ticks is None or found == pytest.approx(ticks)
    assert len(found) <= 5 and all(low <= tick <= high for tick in found)


def test_labels_tell_neighbours_apart():
    assert tick_labels([0, 2.5, 5]) == ["0.0", "2.5", "5.0"]
    assert tick_labels([0, 250_000, 500_000]) == ["0", "250k", "500k"]
    assert tick_labels([1e-5, 2e-5]) == ["1e-05", "2e-05"]
    assert log_ticks(-4, 2, 4) == [-4, -2, 0, 2]
    assert [10**tick for tick in log_ticks(0, 1, 5)] == pytest.approx([2, 4, 6, 8, 10])


def pictured(form):
    pytest.importorskip("matplotlib")
    from llmctl.operate.plot.picture import picture

    runs = {"run $a_1$": training(3000, lambda step: 1000.0 / step), "run-b": training(50, lambda step: 900.0 / step)}
    found = charts({name: history(rows) for name, rows in runs.items()}, ["lm_loss"], "tokens", is_log=True, most=100)
    return picture(found, form), picture(found, form)


def test_an_svg_has_the_names_as_text_and_is_the_same_each_time():
    data, again = pictured("svg")
    assert data == again
    texts = {
        "".join(each.itertext()).strip() for each in ElementTree.fromstring(data).iter() if each.tag.endswith("}text")
    }
    assert {"run $a_1$", "run-b", "tokens", "lm_loss"} <= texts


def test_a_png_and_a_pdf_open():
    from PIL import Image

    data, again = pictured("png")
    image = Image.open(BytesIO(data))
    assert data == again and image.size == (1200, 600) and image.info["Software"] == "llmctl plot"
    assert len(image.convert("RGB").getcolors(1 << 20)) > 10
    data, again = pictured("pdf")
    assert data == again and data.startswith(b"%PDF-") and b"llmctl plot" in data
