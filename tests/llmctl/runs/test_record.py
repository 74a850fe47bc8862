"""Run records and the index of runs."""

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from llmctl import __version__
from llmctl.backends.base import SubmittedJob
from llmctl.errors import RecordError
from llmctl.runs.index import RunIndex
from llmctl.runs.observe import hosts_of
from llmctl.runs.record import PredictedStep, RunRecord, Submission, new_run_id
from llmctl.transport.file_writes import FileWrite, write_files
from llmctl.transport.local import LocalTransport

TRANSPORT = LocalTransport({})


def record_of(root, run_id, name="n", created=1.0, jobs=()):
    record = RunRecord(
        run_id=run_id,
        name=name,
        created=created,
        llmctl_version="0",
        cluster="local",
        run_dir=root / run_id,
        command=("llmctl", "submit"),
        job={"name": name},
        config=None,
        origins={"job.name": "--name"},
        code={"trainer": "ab", "commit": None, "diff": None},
    )
    ids = tuple(SubmittedJob("localhost", job, int(job), 7, "boot") for job in jobs)
    return record.with_submission(Submission(1, created, ids))


def saved(root, *arguments, **more):
    record = record_of(root, *arguments, **more)
    record.run_dir.mkdir(parents=True)
    record.save(TRANSPORT)
    return record


def test_a_record_survives_writing_and_reading(tmp_path):
    record = saved(tmp_path, "a-1", jobs=("12",))
    assert RunRecord.load(record.run_dir, TRANSPORT) == record
    path = record.run_dir / "run.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in record.run_dir.iterdir()] == ["run.json"]
    assert list(json.loads(path.read_text())["submissions"][0]) == [
        "number",
        "time",
        "jobs",
        "cancel_requested",
        "hosts",
        "contents",
        "predicted",
    ]


def test_the_prediction_of_a_submission_is_kept_and_may_be_missing_in_old_records(tmp_path):
    predicted = PredictedStep(1.5, 1 << 30, "H100", 3)
    record = saved(tmp_path, "a-1").with_submission(Submission(2, 5.0, predicted=predicted))
    record.save(TRANSPORT)
    assert RunRecord.load(record.run_dir, TRANSPORT).submissions[-1].predicted == predicted
    path = record.run_dir / "run.json"
    values = json.loads(path.read_text())
    for wrong in ({"device": "H100"}, {**asdict(predicted), "iteration_time_s": "fast"}):
        values["submissions"][-1]["predicted"] = wrong
        path.write_text(json.dumps(values))
        with pytest.raises(RecordError, match="is not a run record"):
            RunRecord.load(record.run_dir, TRANSPORT)
    values["submissions"][-1]["predicted"] = {**asdict(predicted), "watts": 700}
    path.write_text(json.dumps(values))
    with pytest.raises(RecordError, match="submissions.predicted.watts"):
        RunRecord.load(record.run_dir, TRANSPORT)
    for submission in values["submissions"]:
        del submission["predicted"]
    path.write_text(json.dumps(values))
    assert RunRecord.load(record.run_dir, TRANSPORT).submissions[-1].predicted is None


def test_the_hosts_of_a_submission_are_kept_and_may_be_missing_in_old_records(tmp_path):
    record = saved(tmp_path, "a-1").with_submission(Submission(2, 5.0, hosts=("h1", "h3")))
    record.save(TRANSPORT)
    assert hosts_of(RunRecord.load(record.run_dir, TRANSPORT)) == ("h1", "h3")
    values = json.loads((record.run_dir / "run.json").read_text())
    for submission in values["submissions"]:
        del submission["hosts"]
    (record.run_dir / "run.json").write_text(json.dumps(values))
    assert hosts_of(RunRecord.load(record.run_dir, TRANSPORT)) == ()


def test_submissions_are_replaced_by_number_and_the_first_cancel_stays(tmp_path):
    record = record_of(tmp_path, "a-1").with_submission(Submission(2, 5.0))
    record = record.with_submission(Submission(2, 5.0, (SubmittedJob("h", "3"),)))
    assert [len(submission.jobs) for submission in record.submissions] == [0, 1]
    asked = record.with_cancel_requested(8.0).with_cancel_requested(9.0)
    assert [submission.cancel_requested for submission in asked.submissions] == [None, 8.0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1}'])
def test_an_invalid_record_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RecordError, match="run.json"):
        RunRecord.load(tmp_path, TRANSPORT)


@pytest.mark.parametrize(
    "change",
    [
        {"submissions": 7},
        {"submissions": [7]},
        {"submissions": [{"number": 1, "time": "now", "jobs": [], "cancel_requested": None}]},
        {"submissions": [{"number": 1, "time": 1, "jobs": [{"pid": "x"}], "cancel_requested": None}]},
        {"job": "x"},
        {"config": [1]},
        {"config": {"training": None}},
        {"command": 5},
        {"created": "x"},
        {"run_id": "../../x"},
    ],
    ids=str,
)
def test_values_of_another_type_are_damage_too(tmp_path, change):
    record = saved(tmp_path, "a-1", jobs=("12",))
    path = record.run_dir / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RecordError, match="is not a run record"):
        RunRecord.load(record.run_dir, TRANSPORT)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [("9.1", "use llmctl 9.1, which submitted the run, or a newer llmctl"), (__version__, "use a newer llmctl")],
)
def test_a_record_with_keys_of_a_newer_llmctl_is_refused_in_one_sentence(tmp_path, version, remedy):
    record = saved(tmp_path, "a-1", jobs=("12",))
    path = record.run_dir / "run.json"
    values = {**json.loads(path.read_text()), "llmctl_version": version}
    (submission,) = values["submissions"]
    deeper = {**submission, "site": 1, "jobs": [{**job, "array": 2} for job in submission["jobs"]]}
    for change, keys in (
        ({"budget": 1}, "this key of the record: budget"),
        ({"budget": 1, "submissions": [deeper]}, "budget, submissions.site, submissions.jobs.array"),
        ({f"k{number}": 1 for number in range(7)}, "these keys of the record: k0, k1, k2, k3, k4 and 2 more"),
    ):
        path.write_text(json.dumps({**values, **change}))
        with pytest.raises(RecordError) as error:
            RunRecord.load(record.run_dir, TRANSPORT)
        assert error.value.message.startswith(f"{path}: llmctl {__version__} does not know")
        assert keys in error.value.message and error.value.message.endswith(remedy)


def test_an_entry_with_keys_of_a_newer_llmctl_is_read(tmp_path):
    index = RunIndex(tmp_path)
    index.add(record_of(tmp_path, "a-1"))
    path = index.folder / "a-1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "budget": 1}))
    assert [entry.run_id for entry in index.entries()] == ["a-1"]


def test_a_damaged_entry_hides_no_other(tmp_path):
    index = RunIndex(tmp_path / "state")
    index.add(record_of(tmp_path, "a-1"))
    whole = json.loads((index.folder / "a-1.json").read_text())
    for number, text in enumerate(["[]", "{", json.dumps({**whole, "created": "x"}), "[" * 100_000]):
        (index.folder / f"bad{number}.json").write_text(text)
    (index.folder / "folder.json").mkdir()
    assert [entry.run_id for entry in index.entries()] == ["a-1"]


def test_runs_are_found_by_id_prefix_name_and_job(tmp_path):
    index = RunIndex(tmp_path / "state")
    for number, (run_id, name, job) in enumerate(
        [("gpt-1-aa", "gpt", "10"), ("gpt-2-bb", "gpt", "11"), ("bert-3-cc", "bert", "10"), ("gpt", "x", "12")]
    ):
        index.add(record_of(tmp_path, run_id, name, float(number), (job,)))
    found = {key: index.find(key).run_id for key in ("gpt-1-aa", "gpt-2", "bert", "11", "10", "gpt")}
    assert found == {
        "gpt-1-aa": "gpt-1-aa",
        "gpt-2": "gpt-2-bb",
        "bert": "bert-3-cc",
        "11": "gpt-2-bb",
        "10": "bert-3-cc",
        "gpt": "gpt",
    }
    with pytest.raises(RecordError, match="several runs: gpt-2-bb, gpt-1-aa; give more"):
        index.find("gpt-")
    with pytest.raises(RecordError, match="no run is called 'zzz'; the newest are gpt, bert-3-cc"):
        index.find("zzz")
    with pytest.raises(RecordError, match="no run is called ''"):
        index.find("")


def test_the_index_keeps_the_last_state_until_the_next_submission(tmp_path):
    index, record = RunIndex(tmp_path), record_of(tmp_path, "a-1", jobs=("1",))
    index.add(record)
    index.update_state("a-1", "running", 4.0)
    index.update_state("gone", "running", 4.0)
    index.add(record)
    assert [(entry.last_state, entry.last_seen) for entry in index.entries()] == [("running", 4.0)]
    index.add(record.with_submission(Submission(2, 9.0, (SubmittedJob("h", "2"),))))
    assert [(entry.last_state, entry.job_ids) for entry in index.entries()] == [(None, ("1", "2"))]
    index.remove("a-1")
    assert index.entries() == []


def test_the_index_is_rebuilt_from_the_run_directories(tmp_path):
    root, index = tmp_path / "runs", RunIndex(tmp_path / "state")
    index.add(record_of(tmp_path / "elsewhere", "old-1"))
    saved(root, "a-1", created=2.0)
    saved(root, "b-2", created=3.0)
    (root / "torn").mkdir()
    (root / "torn" / "run.json").write_text("{")
    assert [entry.run_id for entry in index.rebuild(root, TRANSPORT)[0]] == ["a-1", "b-2"]
    assert len(index.entries()) == 3
    (index.folder / "a-1.json").write_text("torn")
    assert len(index.entries()) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_run_directories_of_other_users_are_left_out_and_counted():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        root = Path(folder, "runs")
        saved(root, "a-1").run_dir.chmod(0o700)
        root.chmod(0o755)
        saved(root, "b-2").run_dir.chmod(0o700)
        os.chown(root / "b-2", 61001, 61001)
        os.chown(root / "b-2/run.json", 61001, 61001)
        pid = os.fork()
        if pid == 0:
            os.setgroups([])
            os.setgid(61001)
            os.setuid(61001)
            try:
                entries, unread = RunIndex(Path(folder, "state")).rebuild(root, TRANSPORT)
                os._exit(0 if ([entry.run_id for entry in entries], unread) == (["b-2"], 1) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0


def test_the_record_of_a_moved_run_has_its_new_directory(tmp_path):
    record = saved(tmp_path, "a-1")
    record.run_dir.rename(tmp_path / "moved")
    assert RunRecord.load(tmp_path / "moved", TRANSPORT).run_dir == tmp_path / "moved"


def test_concurrent_writers_leave_one_whole_file(tmp_path):
    path = tmp_path / "f"
    texts = [str(number) * 50_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_files([FileWrite(str(path), text.encode())]), texts))
    assert path.read_text() in texts
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]
    index = RunIndex(tmp_path / "state")
    records = [record_of(tmp_path, f"r-{number}") for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(index.add, records))
    assert len(index.entries()) == 20


def test_run_ids_are_named_by_name_and_time():
    assert new_run_id("gpt", "261121-101500").startswith("gpt-261121-101500-")
    assert len(new_run_id("gpt", "261121-101500")) == len("gpt-261121-101500-ab12")


def test_a_record_that_cannot_be_written_is_an_error(tmp_path):
    record = replace(record_of(tmp_path, "a"), run_dir=tmp_path / "file" / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written"):
        record.save(TRANSPORT)
