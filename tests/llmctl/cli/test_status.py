"""``llmctl status`` as users type the command, on handmade run directories and real processes."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from llmctl.cli.main import main
from llmctl.runs.index import RunIndex
from llmctl.runs.record import PredictedStep
from llmctl.runs.view_text import COLUMNS
from llmctl.terminal_text import printable
from llmctl.transport.processes import identify
from tests.llmctl.run_directories import TRANSPORT, beat, fail, leave, make_run, outcome
from tests.waiting import HANG_S


@pytest.fixture
def index(home):
    return RunIndex(home / "state" / "llmctl")


@pytest.fixture
def job():
    """The process that stands in for job.sh."""
    process = subprocess.Popen(["sleep", "10000"], start_new_session=True)
    yield identify(process.pid)
    process.kill()
    process.wait(HANG_S)


def documents(capsys, *arguments):
    assert main(["status", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def finished(home, index, job, run_id, created=None):
    run = make_run(home / "runs", run_id)
    run.record = replace(run.record, created=created or time.time())
    run.submit(job)
    leave(run.start_attempt(), "completed")
    index.add(run.record)
    index.update_state(run_id, "completed", time.time())
    return run


def test_json_has_every_field_by_a_stable_name(home, index, job, capsys):
    run = make_run(home / "runs").submit(job)
    beat(run.start_attempt(), 0, age_s=1)
    run.metrics(1, 2)
    index.add(run.record)
    document = documents(capsys)
    assert document["more"] == 0
    (seen,) = document["runs"]
    fields = """run_id name cluster state detail attempt nodes iteration train_iters loss tokens_per_s mfu eta_s
        metrics_age_s started ended exit_code run_dir job_ids submission submitted attempts expected_start hosts
        skipped_iterations nan_iterations phase iteration_time_s peak_memory_bytes save recent costs
        predicted"""
    assert sorted(seen) == sorted(fields.split())
    assert (seen["state"], seen["iteration"], seen["train_iters"], seen["nodes"]) == ("running", 2, 100, 2)
    assert (seen["run_dir"], seen["job_ids"]) == (str(run.path), [str(job.pid)])
    assert index.entries()[0].last_state == "running"


def test_plain_columns_in_a_pipe(home, index, job, capsys):
    run = make_run(home / "runs").submit(job)
    run.start_attempt()
    run.metrics(41)
    index.add(run.record)
    assert main(["status"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == [*COLUMNS, "DETAIL"]
    assert row.split()[:9] == [
        run.record.run_id,
        "local",
        "running",
        "1",
        "41/100",
        "5.900",
        "5.00k",
        "25.0%",
        "30s",
    ]


def test_a_table_on_a_terminal_with_the_reason_below(home, index, job, capsys, monkeypatch):
    run = make_run(home / "runs").submit(job)
    attempt = run.start_attempt()
    fail(attempt, 1, "CUDA out of memory", age_s=3)
    leave(attempt, "failed", 1)
    index.add(run.record)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "failed" in out
    assert "rank 1 (pp 0, dp 1, tp 0) on n1: RuntimeError: CUDA out of memory" in " ".join(out.split())


def test_the_page_of_a_run_has_what_was_predicted(home, index, job, capsys):
    run = make_run(home / "runs").submit(job)
    predicted = PredictedStep(0.4, 1 << 30, "H100", 0)
    run.record = run.record.with_submission(replace(run.record.submissions[-1], predicted=predicted))
    run.record.save(TRANSPORT)
    run.start_attempt()
    index.add(run.record)
    assert main(["status", "demo"]) == 0
    assert "predicted   0.4 s per iteration, 1.00 GiB on H100" in capsys.readouterr().out.splitlines()
    run.metrics(1, 2, 3, peak_memory_bytes=3 << 29)
    assert main(["status", "demo"]) == 0
    line = "predicted   0.4 s per iteration (measured +25%), 1.00 GiB on H100 (measured +50%)"
    assert line in capsys.readouterr().out.splitlines()
    assert main(["status", "demo", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["predicted"] == asdict(predicted)


LOSS_OF_THREE = "loss        █▅▁  from 9.900 to 9.700"


def test_the_page_of_a_run_shows_its_recent_past(home, index, job, capsys, monkeypatch):
    run = make_run(home / "runs").submit(job)
    attempt = run.start_attempt()
    beat(attempt, 0, age_s=1, phase="checkpoint", beside="building the kernels 40%")
    run.metrics(1, 2, peak_memory_bytes=3 << 29)
    index.add(run.record)
    assert main(["status", "demo"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "phase       saving a checkpoint; building the kernels 40%",
        "rate        0.5 s per iteration, 49s left",
        "ETTR        12.5%: lost 4 s of 4 s: 4 s starts",
    ]
    # A row without a time.
    run.metrics(3, peak_memory_bytes=1 << 31, tokens_per_s=12345.6)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"attempt": 1, "iteration": 4, "lm_loss": NaN, "tokens_per_s": Infinity}\n{"attempt": 1, "iter')
    lines = [
        "iterations  1 to 4",
        LOSS_OF_THREE.replace("▁", "▁ "),
        "tokens/s    ▁▁█   5.00k to 12.3k",
        "memory      ▁▁█   1.50 GiB to 2.00 GiB",
    ]
    assert main(["status", "demo"]) == 0
    assert capsys.readouterr().out.splitlines()[4:] == lines
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["status", "demo"]) == 0
    shown = printable(capsys.readouterr().out).splitlines()
    assert [line.rstrip() for line in shown[-4:]] == lines
    assert max(map(len, shown)) <= 80
    assert main(["status"]) == 0
    assert "iterations  1" not in capsys.readouterr().out


@pytest.mark.parametrize(("encoding", "bars"), [("utf-8", "█▅▁"), ("ascii", "#=_")])
def test_sparklines_fit_the_encoding_of_the_output(home, index, job, encoding, bars):
    run = make_run(home / "runs").submit(job)
    run.start_attempt()
    run.metrics(1, 2, 3)
    index.add(run.record)
    command = [sys.executable, "-m", "llmctl.cli.main", "status", "demo"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=HANG_S, check=True)
    assert LOSS_OF_THREE.replace("█▅▁", bars) in done.stdout.decode(encoding).splitlines()


def test_the_newest_save_is_told_with_its_time_and_speed(home, index, job, capsys):
    run = make_run(home / "runs").submit(job)
    attempt = run.start_attempt()
    save = {"iteration": 500000, "bytes": 3 << 29, "blocked_s": 0.25, "written_s": 3.0}
    beat(attempt, 0, age_s=1, save=save)
    # A damaged heartbeat tells of no save.
    beat(attempt, 1, age_s=1, save={"iteration": 600000})
    run.metrics(1)
    index.add(run.record)
    assert main(["status", "demo"]) == 0
    line = "save        iteration 500000, 1.50 GiB in 3.0 s (512 MiB/s), blocked 0.2 s"
    assert line in capsys.readouterr().out.splitlines()
    assert documents(capsys)["runs"][0]["save"] == save


def test_json_has_the_recent_past_as_numbers(home, index, job, capsys):
    run = make_run(home / "runs").submit(job)
    run.start_attempt()
    run.metrics(1, 2, 3, peak_memory_bytes=7)
    run.metrics(4, lm_loss=float("inf"), iteration_time_s=1e308, time=float("nan"))
    index.add(run.record)
    (seen,) = documents(capsys)["runs"]
    assert seen["recent"] == {
        "first_iteration": 1,
        "iteration": [1, 2, 3, 4],
        "loss": [9.9, 9.8, 9.7, None],
        "tokens_per_s": [5000.0] * 4,
        "peak_memory_bytes": [7, 7, 7, None],
    }
    assert (seen["loss"], seen["peak_memory_bytes"], seen["iteration_time_s"], seen["phase"]) == (None, None, 0.5, None)


REFUSAL = f"/w/ckpt: holds another model: {'keys ' * 60}\nset model.norm_epsilon to 1e-06"


def refused(home, index, job, run_id):
    run = make_run(home / "runs", run_id).submit(job)
    attempt = run.start_attempt()
    fail(attempt, 0, REFUSAL, age_s=3, kind="AnotherModelError", module="trainer.checkpoint.errors")
    leave(attempt, "failed", 3)
    index.add(run.record)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_page_of_one_run_has_the_whole_reason(home, index, job, capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    for run_id in ("one-1", "two-1"):
        refused(home, index, job, run_id)
    assert main(["status"]) == 0
    table = capsys.readouterr().out
    assert "1e-06" not in table
    assert "... (all of it: llmctl status one-1)" in " ".join(table.split())
    assert is_terminal or len(table.splitlines()) == 3
    assert main(["status", "one-1"]) == 0
    page = capsys.readouterr().out
    assert "keys; set model.norm_epsilon to 1e-06" in " ".join(page.split())
    assert is_terminal or len(page.splitlines()) == 2
    assert "AnotherModelError" not in table + page


def test_no_word_of_a_state_is_said_twice(home, index, job, capsys, monkeypatch):
    run = make_run(home / "runs").submit(job)
    attempt = run.start_attempt()
    outcome(attempt, "completed", 100)
    leave(attempt, "completed")
    index.add(run.record)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["status"]) == 0
    assert f"{run.record.run_id} completed at iteration 100" in printable(capsys.readouterr().out)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-3:] == ["at", "iteration", "100"]
    run.metrics(100)
    assert main(["status"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.count("completed") == 1 and row.split()[-1] == "-"


def test_old_finished_runs_are_counted_and_shown_with_all(home, index, job, capsys):
    for number in range(13):
        finished(home, index, job, f"old-{number:02d}", created=1000.0 + number)
    running = make_run(home / "runs", "now-1").submit(job)
    index.add(running.record)
    document = documents(capsys)
    assert document["more"] == 3
    assert [run["run_id"] for run in document["runs"]][:2] == ["now-1", "old-12"]
    assert len(documents(capsys, "--all")["runs"]) == 14
    assert main(["status"]) == 0
    assert "3 more ended runs: llmctl status --all" in capsys.readouterr().err


def test_all_runs_come_in_pages_and_a_program_gets_them_whole(home, index, job, capsys, monkeypatch):
    monkeypatch.setattr("llmctl.cli.status.PAGE", 2)
    for number in range(5):
        finished(home, index, job, f"old-{number}", created=1000.0 + number)
    shown = []
    for page in ("1", "2", "3"):
        assert main(["status", "--all", "--page", page]) == 0
        out, err = capsys.readouterr()
        shown.append([line.split()[0] for line in out.splitlines()[1:]])
        assert ("llmctl status --all --page" in err) == (page != "3")
    assert shown == [["old-4", "old-3"], ["old-2", "old-1"], ["old-0"]]
    assert main(["status", "--all"]) == 0
    assert "3 older runs: llmctl status --all --page 2" in capsys.readouterr().err
    assert [len(documents(capsys, *words)["runs"]) for words in (["--all"], ["--all", "--page", "3"])] == [5, 1]
    assert documents(capsys, "--all", "--page", "1")["more"] == 3
    assert main(["status", "--all", "--page", "4"]) == 2
    assert "4 is past the last page, 3" in capsys.readouterr().err
    assert main(["status", "--page", "1"]) == 2 == main(["status", "old-1", "--all", "--page", "1"])
    assert "only --all has pages" in capsys.readouterr().err


def test_runs_by_id_beginning_name_and_job_id(home, index, job, capsys):
    run = make_run(home / "runs", "alpha-1").submit(job)
    index.add(run.record)
    index.add(make_run(home / "runs", "beta-1").submit(None).record)
    for reference in ("alpha-1", "alph", "alpha", str(job.pid)):
        assert [seen["run_id"] for seen in documents(capsys, reference)["runs"]] == ["alpha-1"]
    assert len(documents(capsys, "alpha", "alpha-1")["runs"]) == 1
    assert main(["status", "gamma"]) == 5
    assert "alpha-1" in capsys.readouterr().err


def test_the_index_is_rebuilt_from_the_runs_root(home, job, capsys):
    run = make_run(home / "runs").submit(job)
    (home / "runs" / "no-run").mkdir()
    assert documents(capsys) == {"runs": [], "more": 0}
    assert main(["status"]) == 0
    assert "--cluster NAME" in capsys.readouterr().err
    assert [seen["run_id"] for seen in documents(capsys, "--cluster", "local")["runs"]] == [run.record.run_id]
    assert [seen["run_id"] for seen in documents(capsys)["runs"]] == [run.record.run_id]
    assert main(["status", "--cluster", "nowhere"]) == 2


def test_a_run_without_its_directory_is_unknown_not_an_error(home, index, capsys):
    run = make_run(home / "runs").submit(None)
    index.add(run.record)
    index.update_state(run.record.run_id, "running", time.time())
    (run.path / "run.json").unlink()
    (seen,) = documents(capsys)["runs"]
    assert seen["state"] == "unknown"
    assert "run.json" in seen["detail"]
    assert "last seen running" in seen["detail"]


def test_a_run_of_a_newer_llmctl_is_named_beside_the_other_runs(home, index, job, capsys):
    finished(home, index, job, "b-1")
    run = make_run(home / "runs", "a-1").submit(None)
    index.add(run.record)
    values = {**json.loads((run.path / "run.json").read_text()), "budget": 1, "llmctl_version": "9.1"}
    (run.path / "run.json").write_text(json.dumps(values))
    assert main(["status", "--json", "--cluster", "local"]) == 0
    shown = capsys.readouterr()
    seen = {run["run_id"]: run for run in json.loads(shown.out)["runs"]}
    assert (seen["b-1"]["state"], seen["a-1"]["state"]) == ("completed", "unknown")
    assert "does not know this key of the record: budget; use llmctl 9.1" in seen["a-1"]["detail"]
    assert "1 runs cannot be read and are left out; they may be other users', or of a newer llmctl" in shown.err
    assert main(["resume", "a-1"]) == 5
    assert "does not know this key of the record: budget; use llmctl 9.1" in capsys.readouterr().err


def test_watch_ends_when_all_have_ended(home, index, job, capsys):
    run = make_run(home / "runs").submit(job)
    attempt = run.start_attempt()
    outcome(attempt, "stopped", 12)
    leave(attempt, "stopped")
    index.add(run.record)
    assert main(["status", "--watch"]) == 0
    assert "stopped at iteration 12, saved; llmctl resume" in capsys.readouterr().out
    assert main(["status", "--watch", "--json"]) == 2


def test_watch_shows_changes(home, index, job):
    run = make_run(home / "runs").submit(job)
    attempt = run.start_attempt()
    index.add(run.record)
    watcher = subprocess.Popen(
        [sys.executable, "-m", "llmctl.cli.main", "status", "--watch"],
        stdout=subprocess.PIPE,
        env=os.environ,
        text=True,
    )
    try:
        assert "CLUSTER" in watcher.stdout.readline()
        assert " running " in watcher.stdout.readline()
        leave(attempt, "completed")
        rest, _ = watcher.communicate(timeout=HANG_S)
        assert " completed " in rest.splitlines()[-1]
        assert watcher.returncode == 0
    finally:
        watcher.kill()
        watcher.wait(HANG_S)


def test_status_loads_neither_torch_nor_rich(home, index, job):
    index.add(make_run(home / "runs").submit(job).record)
    program = (
        "import sys; from llmctl.cli.main import main; assert main(['status']) == 0;"
        "print([m for m in ('torch', 'rich', 'paramiko', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
