import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmctl.runs.metrics import MetricsTable, parse_row
from llmctl.runs.series import reading
from llmctl.runs.series.columns import parse_columns
from llmctl.runs.series.curves import run_curves
from llmctl.runs.series.history import RunHistory
from llmctl.runs.series.reading import MetricsSource, read_histories
from llmctl.transport.file_reads import FileRead, read_parts
from trainer.config.records.row_fields import FIELDS

KEYS = ("*_loss", "grad_norm")


def line(iteration, attempt=1, **values):
    row = {"attempt": attempt, "iteration": iteration, "consumed_tokens": 8 * iteration, "lm_loss": 9.0 - iteration}
    return json.dumps({**row, "iteration_time_s": 0.5, "time": 1000.0 + iteration, **values}) + "\n"


def history_of(text, keys=KEYS):
    history = RunHistory()
    history.add(parse_columns(text.encode(), keys))
    return history


def columns(history, key="lm_loss"):
    return dict(zip(history.rows.iteration, history.rows.values[key], strict=True))


def test_only_the_asked_keys_and_the_axes_are_kept():
    rows = history_of(line(1, grad_norm=2, mfu=0.5, mtp_1_loss=3.0)).rows
    assert sorted(rows.values) == ["consumed_tokens", "grad_norm", "iteration_time_s", "lm_loss", "mtp_1_loss", "time"]
    assert rows.values["grad_norm"].tolist() == [2.0]


def test_a_number_that_a_row_does_not_have_is_nan_and_a_key_without_any_is_absent():
    odd = [line(1, lm_loss=None), line(2, lm_loss="x"), line(3, lm_loss=True), line(4, lm_loss=10**400), line(5)]
    rows = history_of("".join(odd) + line(6, grad_norm=7.0) + line(7, mtp_1_loss=None)).rows
    assert [math.isnan(value) for value in rows.values["lm_loss"]] == [True] * 4 + [False] * 3
    assert [math.isnan(value) for value in rows.values["grad_norm"]] == [True] * 5 + [False, True]
    assert "mtp_1_loss" not in rows.values


def test_a_damaged_line_loses_only_itself():
    text = line(1) + "not a row\n" + line(2)[:20] + line(3) + "[1, 2]\n" + '{"iteration": -1}\n' + line(4)
    assert list(history_of(text).rows.iteration) == [1, 3, 4]
    # Lines that are rows only together are none.
    assert list(history_of('{"iteration": 1\n"attempt": 1}\n').rows.iteration) == []


def test_a_resume_drops_the_steps_behind_its_checkpoint_and_counts_them():
    first = "".join(line(step) for step in range(1, 8)) + line(7, valid_loss=4.0, lm_loss=None)
    history = history_of(first + line(5, attempt=2, lm_loss=0.5))
    # Steps 6 and 7 were undone, though no attempt has done them again yet.
    assert columns(history) == {1: 8.0, 2: 7.0, 3: 6.0, 4: 5.0, 5: 0.5}
    assert not any(history.rows.is_valid)
    assert (history.attempts[1].undone_iterations, history.attempts[1].undone_s) == (3, 1.5)
    assert (history.attempts[1].first_iteration, history.attempts[1].last_iteration) == (1, 7)
    assert (history.attempts[2].undone_iterations, history.attempts[2].first_iteration) == (0, 5)


OTHERS = sorted({field.when for field in FIELDS.values() if field.when.startswith(("a ", "tasks"))})


@pytest.mark.parametrize("when", OTHERS)
def test_a_row_of_another_thing_than_a_step_may_come_after_later_steps(when):
    """As that of a save or copy beside training, which has the iteration of its state."""
    late = {name: 3 for name, field in FIELDS.items() if field.when in (when, "every row")} | {"iteration": 1}
    text = line(1) + line(2) + json.dumps({**late, "attempt": 1}) + "\n" + line(3)
    assert columns(history_of(text)) == {1: 8.0, 2: 7.0, 3: 6.0}
    assert history_of(text).attempts[1].undone_iterations == 0
    table = MetricsTable()
    for one in text.splitlines():
        table.add(parse_row(one.encode()))
    assert [row["lm_loss"] for row in table.train.values()] == [8.0, 7.0, 6.0]


def test_a_row_of_an_attempt_that_lost_the_run_does_not_count():
    first, second = {"fencing_token": 1}, {"fencing_token": 2, "attempt": 2}
    text = line(1, **first) + line(2, **second, lm_loss=1.5) + line(2, **first) + line(9, **first) + line(3, **second)
    assert columns(history_of(text)) == {1: 8.0, 2: 1.5, 3: 6.0}


def test_chunks_give_the_same_history_as_one_piece():
    lines = [line(step, grad_norm=1.0) for step in range(1, 6)] + [line(5, valid_loss=2.0)]
    lines += [line(step, attempt=2) for step in range(4, 9)]
    whole, parts = history_of("".join(lines)), RunHistory()
    for one in lines:
        parts.add(parse_columns(one.encode(), KEYS))
    assert list(whole.rows.iteration) == list(parts.rows.iteration) == list(range(1, 9))
    assert columns(whole) == columns(parts)
    assert repr(columns(whole, "grad_norm")) == repr(columns(parts, "grad_norm"))
    assert whole.attempts == parts.attempts


def test_an_interval_of_rows_counts_its_iterations():
    text = line(10) + line(20) + line(30) + line(20, attempt=2)
    assert history_of(text).attempts[1].undone_iterations == 20


def test_few_rows_are_points_themselves():
    curves = run_curves(history_of(line(1) + line(2) + line(2, valid_loss=3.0, lm_loss=None, consumed_tokens=None)))
    assert (curves.train.iteration, curves.train.tokens, curves.train.time) == ([1, 2], [8.0, 16.0], [1001.0, 1002.0])
    assert curves.train.of["lm_loss"].mean == [8.0, 7.0]
    assert not curves.train.of["lm_loss"].has_envelope
    assert (curves.valid.iteration, curves.valid.tokens) == ([2], [16.0])
    assert curves.valid.of["valid_loss"].mean == [3.0]
    assert "lm_loss" not in curves.valid.of and "valid_loss" not in curves.train.of


def test_many_rows_become_points_that_show_every_spike():
    text = "".join(line(step, lm_loss=100.0 if step == 503 else 2.0) for step in range(1, 1002))
    curves = run_curves(history_of(text), 100)
    loss = curves.train.of["lm_loss"]
    assert len(curves.train.iteration) == 91
    assert curves.train.iteration[-1] == 1001
    assert (max(loss.high), loss.high.count(100.0), min(loss.low)) == (100.0, 1, 2.0)
    point = loss.high.index(100.0)
    assert loss.mean[point] == pytest.approx(2 + 98 / 11)


def test_a_point_without_a_number_is_none_and_large_numbers_have_a_mean():
    text = "".join(line(step, lm_loss=None if step <= 4 else 1.5e308) for step in range(1, 9))
    loss = run_curves(history_of(text), 2).train.of["lm_loss"]
    assert loss.mean == [None, pytest.approx(1.5e308)]
    assert loss.high == [None, 1.5e308]


def test_a_file_is_read_in_chunks_of_whole_lines_and_half_a_row_at_its_end_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step) for step in range(1, 30)) + line(30)[:-1])
    reads = []

    def read(asked: list[FileRead]):
        reads.extend(asked)
        return read_parts(asked)

    (history, absent) = read_histories([MetricsSource(str(path), read), MetricsSource("/absent", read)], KEYS)
    assert list(history.rows.iteration) == list(range(1, 30))
    assert len(absent.rows) == 0
    assert len(reads) > 30


@pytest.mark.parametrize("chunk", [1, 40, 5000, 10_000_000])
@pytest.mark.parametrize("is_here", [True, False])
def test_other_processes_give_the_same_history(tmp_path, monkeypatch, chunk, is_here):
    # The second and the last run have no metrics; half a row, and one that is longer than the others.
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl")]
    text = "".join(line(step) for step in range(1, 12)) + line(12, words="x" * 300) + line(7, attempt=2)
    paths[0].write_text(text + line(13)[:-1])
    paths[2].write_text(text)
    alone = list(read_histories([MetricsSource(str(path), read_parts) for path in paths], KEYS))
    monkeypatch.setattr(reading, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(reading, "CHUNK", chunk)
    monkeypatch.setattr(reading, "_LONG_ROW", 1)
    monkeypatch.setattr(reading, "AHEAD", 2)
    monkeypatch.setattr(reading.os, "sched_getaffinity", lambda _: {0, 1})
    # In threads of this process, which are as good for the order of chunks and start sooner.
    monkeypatch.setattr(reading, "ProcessPoolExecutor", lambda count, _: ThreadPoolExecutor(count))
    together = list(read_histories([MetricsSource(str(path), read_parts, is_here) for path in paths], KEYS))
    assert [history.attempts for history in together] == [history.attempts for history in alone]
    assert [history.rows for history in together] == [history.rows for history in alone]
    assert [len(history.rows) for history in together] == [7, 0, 7, 0]


def test_real_processes_parse_a_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step) for step in range(1, 300)))
    monkeypatch.setattr(reading, "WORTH_PROCESSES", 0)
    monkeypatch.setattr(reading.os, "sched_getaffinity", lambda _: {0, 1})
    for is_here in (True, False):
        (history,) = read_histories([MetricsSource(str(path), read_parts, is_here)], KEYS)
        assert len(history.rows) == 299
