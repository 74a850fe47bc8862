"""The recent past of a run, and numbers as text."""

import math

import pytest

from llmctl.durations import short_duration
from llmctl.runs.metrics import MetricsTable
from llmctl.runs.number_text import iteration_time_text, loss_text, memory_text, rate_text, sparkline
from llmctl.runs.recent import MAX_POINTS, recent_metrics


def table(*rows):
    made = MetricsTable()
    for iteration, loss in rows:
        made.add({"iteration": iteration, "lm_loss": loss})
    return made


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (range(8), "▁▂▃▄▅▆▇█"),
        ([3.0, None, 1.0, 2.0], "█ ▁▅"),
        ([5.0, 5.0, 5.0], "▅▅▅"),
        ([1e308, -1e308, 0.0], "█▁▅"),
        ([1.0, 2.0], ""),
        ([1.0, None, 2.0], ""),
        ([], ""),
    ],
)
def test_sparkline(values, line):
    assert sparkline(list(values), encoding="UTF-8") == line


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "", None])
def test_other_encodings_get_ascii(encoding):
    assert sparkline(list(range(8)), encoding=encoding) == "_.-:=+*#"


def test_many_rows_are_few_points_of_equally_many_rows():
    recent = recent_metrics(table(*((number, float(number)) for number in range(1, 102))))
    assert recent.first_iteration == 1 and recent.iteration[-1] == 101
    assert len(recent.iteration) == 34 <= MAX_POINTS
    assert recent.loss[-1] == pytest.approx(100.0) and recent.loss[0] == 1.5
    assert recent.peak_memory_bytes == (None,) * 34


def test_rows_that_a_resume_goes_back_behind_are_not_its_past():
    recent = recent_metrics(table((1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0)))
    assert (recent.iteration, recent.loss) == ((1, 2), (9.0, 6.0))
    assert recent_metrics(MetricsTable()) is None


def test_values_that_are_not_finite_are_left_out():
    recent = recent_metrics(table((1, math.nan), (2, math.inf), (3, 10**400), (4, "x"), (5, 1.0)))
    assert recent.loss == (None, None, None, None, 1.0)
    huge = recent_metrics(table(*((number, 1.7e308) for number in range(1, 100))))
    assert all(math.isfinite(loss) for loss in huge.loss)


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (loss_text, 3.20954, "3.210"),
        (loss_text, 1234.4, "1234"),
        (rate_text, 512.4, "512"),
        (rate_text, 999.6, "1.00k"),
        (rate_text, 51234.0, "51.2k"),
        (rate_text, 1.2e6, "1.20M"),
        (rate_text, 0.0, "0"),
        (memory_text, 612 << 20, "612 MiB"),
        (memory_text, 3 << 29, "1.50 GiB"),
        (memory_text, 123 << 30, "123 GiB"),
        (memory_text, 1500 << 30, "1500 GiB"),
        (iteration_time_text, 0.52123, "0.521 s"),
        (iteration_time_text, 99.96, "1m40s"),
        (short_duration, 59.7, "1m00s"),
        (short_duration, -1.0, "0s"),
        (short_duration, 7800.0, "2h10m"),
        (short_duration, 90000.0, "1d01h"),
    ],
)
def test_numbers_have_few_digits(form, value, text):
    assert form(value) == text
