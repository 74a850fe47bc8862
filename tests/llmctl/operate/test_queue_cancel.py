"""``llmctl cancel`` with a scheduler: the cancel file, then the scheduler's command; nothing if in doubt."""

import json
import threading
import time
from dataclasses import replace

import pytest

from llmctl.cli.main import main
from llmctl.operate import queue_cancel
from llmctl.runs.record import RunRecord
from llmctl.transport.local import LocalTransport
from tests.llmctl.run_directories import TRANSPORT, beat, leave
from tests.waiting import HANG_S


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Divide the waiting times by ten."""
    monkeypatch.setattr(queue_cancel, "BEYOND_GRACE_S", 0.3)
    monkeypatch.setattr(queue_cancel, "LEAVE_S", 0.3)
    monkeypatch.setattr(queue_cancel, "END_S", 0.5)
    monkeypatch.setattr(queue_cancel, "PAUSES_S", (0.05, 0.05))


def cancel(capsys, *arguments, code=0):
    assert main(["cancel", "demo-1", "--grace", "0.2", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def requested(made):
    return RunRecord.load(made.path, TRANSPORT).submissions[-1].cancel_requested


def test_a_pending_job_is_ended_at_once(cluster, capsys):
    made = cluster.run()
    cluster.backend.says("queue", "17|PENDING|job-demo-1|nodes are busy")
    cluster.backend.does("cancel", ': >"$1/queue"')
    assert cancel(capsys) == "demo-1: cancelled before it began\n"
    assert cluster.backend.calls("cancel") == ["cancel 17"]
    assert requested(made) == pytest.approx(time.time(), abs=60)
    assert cluster.index.find("demo-1").last_state == "cancelled"


def test_secrets_of_a_job_that_never_ran_are_removed(cluster, capsys):
    made = cluster.run()
    made.record = replace(made.record, job={"nodes": 1, "secrets": ["TOKEN"]})
    made.record.save(TRANSPORT)
    secrets = made.path / "own" / "secrets"
    secrets.mkdir(parents=True)
    for name in ("demo-1.1", "demo-10.1"):
        (secrets / name).write_text("TOKEN\0hidden\0")
    cluster.backend.says("queue", "17|PENDING|job-demo-1")
    cluster.backend.does("cancel", ': >"$1/queue"')
    cancel(capsys)
    assert [path.name for path in secrets.iterdir()] == ["demo-10.1"]


def test_a_running_job_that_saves_in_time_needs_no_scheduler_command(cluster, capsys):
    made = cluster.run()
    attempt = made.start_attempt()
    beat(attempt, 0, age_s=1)
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")

    def play_job():
        while not (attempt / "cancel").exists():
            time.sleep(0.02)
        leave(attempt, "cancelled")
        cluster.backend.says("queue")

    job = threading.Thread(target=play_job)
    job.start()
    assert cancel(capsys) == "demo-1: cancelled\n"
    job.join(HANG_S)
    assert (attempt / "cancel").read_text() == "0\n"
    assert cluster.backend.calls("cancel") == []


def test_the_folder_is_listed_during_the_wait_for_exit_json(cluster, capsys, monkeypatch):
    """A network file system may answer a read by name from its cache."""
    attempt = cluster.run().start_attempt()
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    listed = []
    list_names = LocalTransport.list_names

    def counted(folders):
        listed.extend(folders)
        if (attempt / "cancel").exists() and folders == [str(attempt)]:
            leave(attempt, "cancelled")
            cluster.backend.says("queue")
        return list_names(folders)

    monkeypatch.setattr(LocalTransport, "list_names", staticmethod(counted))
    assert cancel(capsys) == "demo-1: cancelled\n"
    assert str(attempt) in listed
    assert cluster.backend.calls("cancel") == []


def test_a_job_that_does_not_end_is_ended_by_the_scheduler(cluster, capsys):
    made = cluster.run()
    attempt = made.start_attempt()
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    cluster.backend.does("cancel", 'echo "17|CANCELLED by 0|job-demo-1" >"$1/queue"')
    assert "cancelled; job.sh ended before exit.json could be written" in cancel(capsys)
    assert (attempt / "cancel").exists()
    assert cluster.backend.calls("cancel") == ["cancel 17"]


def test_a_job_with_exit_json_has_ended_although_its_epilog_goes_on(cluster, capsys):
    attempt = cluster.run().start_attempt()
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    cluster.backend.does("cancel", ":")
    later = threading.Timer(0.1, lambda: leave(attempt, "cancelled"))
    later.start()
    assert cancel(capsys) == "demo-1: cancelled\n"
    later.join()


def test_a_cancel_by_llmctl_is_told_from_that_of_somebody_else(cluster, capsys):
    made = cluster.run()
    attempt = made.start_attempt()
    (attempt / "outcome.json").write_text(json.dumps({"reason": "stopped", "iteration": 3, "time": time.time()}))
    cluster.backend.says("queue", "17|PENDING|job-demo-1")
    cluster.backend.does("cancel", 'echo "17|CANCELLED by 0|job-demo-1" >"$1/queue"')
    said = cancel(capsys)
    assert "cancelled by llmctl" in said and "not by llmctl" not in said


def test_a_job_that_remains_after_exit_json_is_ended(cluster, capsys):
    made = cluster.run()
    attempt = made.start_attempt()
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    cluster.backend.does("cancel", ': >"$1/queue"')
    later = threading.Timer(0.2, lambda: leave(attempt, "cancelled"))
    later.start()
    assert cancel(capsys) == "demo-1: cancelled\n"
    later.join()
    assert cluster.backend.calls("cancel") == ["cancel 17"]


def test_a_job_that_cannot_be_ended_is_an_error_that_names_it(cluster, capsys):
    cluster.run().start_attempt()
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    message = cancel(capsys, code=4)
    assert "demo-1: the scheduler was asked to end job 17 but still reports it as RUNNING" in message


def test_a_refusal_is_reported_unless_the_job_has_left_the_queue(cluster, capsys):
    cluster.run()
    cluster.backend.says("queue", "17|PENDING|job-demo-1")
    cluster.backend.fails("cancel", "refused: you do not own job 17")
    assert "refused: you do not own job 17; ask the one who wrote this" in cancel(capsys, code=4)
    cluster.backend.does("cancel", ': >"$1/queue"')
    assert cancel(capsys).startswith("demo-1: cancelled")


def test_a_busy_scheduler_is_asked_again(cluster, capsys, monkeypatch):
    monkeypatch.setattr(queue_cancel.RetryPolicy, "pauses_s", (0.05, 0.05))
    cluster.run()
    cluster.backend.says("queue", "17|PENDING|job-demo-1")
    cluster.backend.fails("cancel", "the server is busy")
    again = 'if (( $(grep -c ^cancel "$1/calls") == 2 )); then rm "$1/cancel.error"; : >"$1/queue"; fi'
    cluster.backend.does("cancel", again)
    assert cancel(capsys).startswith("demo-1: cancelled")
    assert len(cluster.backend.calls("cancel")) == 2


def test_nothing_is_ended_while_the_scheduler_does_not_answer(cluster, capsys):
    made = cluster.run()
    cluster.backend.fails("queue", "no route to it")
    assert "demo-1: nothing was ended: the scheduler does not answer: no route to it" in cancel(capsys, code=4)
    assert requested(made) is None
    assert cluster.backend.calls("cancel") == []


def test_a_run_ends_by_its_cancel_file_without_the_scheduler(cluster, capsys):
    made = cluster.run()
    attempt = made.start_attempt()
    beat(attempt, 0, age_s=1)
    cluster.backend.fails("queue", "no route to it")
    later = threading.Timer(0.2, lambda: leave(attempt, "cancelled"))
    later.start()
    assert cancel(capsys) == "demo-1: cancelled\n"
    later.join()
    second = cluster.run("second-1", "18").start_attempt()
    beat(second, 0, age_s=1)
    assert main(["cancel", "second-1", "--grace", "0.1"]) == 4
    assert "asked to end, but has not ended yet: the scheduler does not answer" in capsys.readouterr().err


def test_a_later_job_of_the_same_id_is_never_ended(cluster, capsys):
    cluster.run()
    cluster.backend.says("queue", "17|RUNNING|somebody-elses")
    cluster.backend.says("accounting", "17|RUNNING|somebody-elses")
    cancel(capsys)
    assert cluster.backend.calls("cancel") == []


def test_a_job_found_by_its_name_is_ended(cluster, capsys):
    cluster.run(job_id=None)
    cluster.backend.says("queue", "23|PENDING|job-demo-1")
    cluster.backend.does("cancel", ': >"$1/queue"')
    assert cancel(capsys) == "demo-1: cancelled before it began\n"
    assert cluster.backend.calls("cancel") == ["cancel 23"]


def test_a_run_without_a_record_is_ended_by_name(cluster, capsys):
    made = cluster.run()
    (made.path / "run.json").unlink()
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    assert "demo-1: ended its job" in cancel(capsys)
    assert cluster.backend.calls("cancel") == ["cancel 17"]
    cluster.backend.says("queue")
    assert "run.json: is not there" in cancel(capsys, code=5)


def test_a_run_without_a_record_stays_while_the_scheduler_does_not_answer(cluster, capsys):
    made = cluster.run()
    (made.path / "run.json").unlink()
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    cluster.backend.fails("queue", "no route to it")
    assert "demo-1: nothing was ended: " in cancel(capsys, code=4)
    assert cluster.backend.calls("cancel") == []


def test_a_run_that_is_being_submitted_is_not_called_ended(cluster, capsys):
    made = cluster.run(job_id=None, age_s=0.0)
    assert "demo-1 is being submitted at this moment" in cancel(capsys, code=4)
    assert requested(made) is None
    assert cluster.backend.calls("cancel") == []


def test_an_ended_run_stays_unchanged(cluster, capsys):
    made = cluster.run()
    leave(made.start_attempt(), "completed")
    assert cancel(capsys) == "demo-1 had already ended: completed\n"
    assert requested(made) is None
    assert cluster.backend.calls() == []
