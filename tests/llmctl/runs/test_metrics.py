import json

from llmctl.runs.metrics import MetricsReader, number, parse_row
from llmctl.transport.file_reads import FileRead, read_parts


def line(iteration, attempt=1, **values):
    return json.dumps({"attempt": attempt, "iteration": iteration, "lm_loss": 9.0 - iteration, **values}) + "\n"


def test_only_complete_lines_count_and_only_new_bytes_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    checks = []

    def read(reads):
        checks.extend(reads)
        return read_parts(reads)

    reader = MetricsReader(str(path), read)
    assert reader.poll() == []
    path.write_text(line(1) + line(2)[:10])
    assert [row["iteration"] for row in reader.poll()] == [1]
    with path.open("a") as file:
        file.write(line(2)[10:] + line(3))
    assert [row["iteration"] for row in reader.poll()] == [2, 3]
    assert checks[-1] == FileRead(str(path), len(line(1)) + 10)
    assert reader.poll() == []
    assert reader.table.newest["iteration"] == 3


def test_the_last_row_of_an_iteration_wins_and_the_newest_is_the_one_written_last(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(3) + line(2, attempt=2, lm_loss=1.5))
    reader = MetricsReader(str(path), read_parts)
    reader.poll()
    assert reader.table.train[2]["lm_loss"] == 1.5
    assert sorted(reader.table.train) == [1, 2, 3]
    assert reader.table.newest["attempt"] == 2


def test_a_row_of_an_attempt_that_lost_the_run_does_not_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first, second = {"fencing_token": 1}, {"fencing_token": 2, "attempt": 2}
    path.write_text(line(1, **first) + line(2, **second, lm_loss=1.5) + line(2, **first) + line(9, **first))
    reader = MetricsReader(str(path), read_parts)
    reader.poll()
    assert {iteration: row["attempt"] for iteration, row in reader.table.train.items()} == {1: 1, 2: 2}
    assert reader.table.newest["lm_loss"] == 1.5


def test_a_row_after_an_incomplete_row_is_found(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2)[:13] + line(2, attempt=2))
    reader = MetricsReader(str(path), read_parts)
    assert [(row["attempt"], row["iteration"]) for row in reader.poll()] == [(1, 1), (2, 2)]


def test_unusable_numbers_and_rows_are_none():
    assert number({"lm_loss": 10**400}, "lm_loss") is None
    assert parse_row(b'{"iteration": true}') is None
    assert parse_row(b"[" * 100_000) is None


def test_invalid_lines_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\0\xff\xfe{{{\n[1]\n{}\n" + line(1).encode() + b'{"iteration": "x"}\n')
    reader = MetricsReader(str(path), read_parts)
    assert [row["iteration"] for row in reader.poll()] == [1]
    assert parse_row(b"") is None


def test_validation_rows_are_separate(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + json.dumps({"attempt": 1, "iteration": 1, "valid_loss": 5.0, "valid_ppl": 148.4}) + "\n")
    reader = MetricsReader(str(path), read_parts)
    reader.poll()
    assert reader.table.newest["lm_loss"] == 8.0
    assert reader.table.valid[1]["valid_loss"] == 5.0


def test_a_truncated_file_is_read_from_the_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(i) for i in range(1, 9)))
    reader = MetricsReader(str(path), read_parts)
    reader.poll()
    path.write_text(line(1, attempt=2))
    assert [row["attempt"] for row in reader.poll()] == [2]
    assert list(reader.table.train) == [1]


def test_the_tail_of_a_large_file_gives_the_newest_rows_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(i, iteration_time_s=0.5 if i < 5000 else 2.0) for i in range(1, 5012)))
    reader = MetricsReader(str(path), read_parts)
    reader.skip_to_tail()
    rows = reader.poll()
    assert rows[-1]["iteration"] == 5011
    assert len(rows) < 1500
    assert reader.table.iteration_time_s() == 2.0


def test_iteration_time_is_of_the_newest_attempt(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(line(i, iteration_time_s=9.0) for i in range(1, 9)) + line(9, attempt=2, iteration_time_s=1.0)
    )
    reader = MetricsReader(str(path), read_parts)
    assert reader.table.iteration_time_s() is None
    reader.poll()
    assert reader.table.iteration_time_s() == 1.0
