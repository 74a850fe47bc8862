"""Logs, heartbeats and failure records of real processes, for every way to end."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.waiting import HANG_S, wait_for
from trainer.process.failure import PeerFailedError, record_failure
from trainer.process.heartbeat import Heartbeat
from trainer.process.run_directory import RunDirectory, write_json
from trainer.process.stop import StopRequest

SPEAK = """
import ctypes, os, sys
from pathlib import Path
from trainer.process.rank_log import redirect_output
console = redirect_output(Path(sys.argv[1]), also_console=sys.argv[2] == "0")
print("from python")
print("to stderr", file=sys.stderr)
ctypes.CDLL(None).dprintf(1, b"from C\\n")
sys.stdout.write("no newline")
{end}
"""


def speak(tmp_path, rank, end):
    log = tmp_path / "attempts" / "1" / "rank.log"
    command = [sys.executable, "-c", SPEAK.format(end=end), str(log), rank]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    return done, log.read_text()


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)", "os._exit(3)", "os.abort()"])
def test_every_line_is_in_the_file_whatever_ends_the_process(tmp_path, end):
    _, log = speak(tmp_path, "1", end)
    assert log.startswith("from python\nto stderr\nfrom C\nno newline")


def test_crash_leaves_a_stack(tmp_path):
    _, log = speak(tmp_path, "1", "os.abort()")
    assert "Fatal Python error: Aborted" in log


def test_rank_0_also_prints_on_the_console(tmp_path):
    done, log = speak(tmp_path, "0", "print(); 1 / 0")
    assert "ZeroDivisionError" in log
    assert done.stdout == log
    assert speak(tmp_path, "1", "pass")[0].stdout == ""


def test_closed_console_does_not_stop_a_rank(tmp_path):
    log = tmp_path / "rank.log"
    code = SPEAK.format(end="import time\nfor i in range(30): print('x' * 9999); time.sleep(0.01)\nprint('end')")
    process = subprocess.Popen([sys.executable, "-c", code, str(log), "0"], stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(timeout=HANG_S) == 0
    assert log.read_text().endswith("end\n")


def test_heartbeat_names_the_phase_in_which_a_rank_hangs(tmp_path):
    path = tmp_path / "heartbeat" / "rank-00002.json"
    with Heartbeat(path, 2) as heartbeat:
        heartbeat.beat(7, "data")
        heartbeat.beat(7, "forward and backward")
        wait_for(lambda: json.loads(path.read_text())["phase"] != "start", "the next heartbeat")
        found = json.loads(path.read_text())
        assert (found["rank"], found["iteration"], found["phase"]) == (2, 7, "forward and backward")
        assert found["pid"] == os.getpid()
        heartbeat.beat(8, "completed")
    assert json.loads(path.read_text())["phase"] == "completed"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_heartbeat_survives_a_folder_it_cannot_write(tmp_path):
    (tmp_path / "file").write_text("")
    with Heartbeat(tmp_path / "file" / "rank.json", 0) as heartbeat:
        heartbeat.beat(1, "data")


def test_stop_by_file_and_by_signal(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.process.stop._POLL_S", 0.01)
    with StopRequest(tmp_path / "stop") as stop:
        assert not stop.is_made()
        (tmp_path / "stop").touch()
        wait_for(stop.is_made, "the file to be seen")
        (tmp_path / "stop").unlink()
        assert stop.is_made()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        before = signal.getsignal(number)
        with StopRequest(None) as stop:
            assert not stop.is_made()
            os.kill(os.getpid(), number)
            assert stop.is_made()
        assert signal.getsignal(number) == before


def test_a_file_system_that_does_not_answer_holds_no_step_up(tmp_path, monkeypatch):
    """The folder is opened for each look, in a thread."""
    opened, answers = [], threading.Event()
    scan = os.scandir

    def slow(path):
        opened.append(path)
        if len(opened) > 1:
            assert answers.wait(HANG_S)
        return scan(path)

    monkeypatch.setattr("trainer.process.stop._POLL_S", 0.01)
    monkeypatch.setattr("trainer.process.stop.os.scandir", slow)
    with StopRequest(tmp_path / "stop") as stop:
        wait_for(lambda: len(opened) == 2, "the second look")
        (tmp_path / "stop").touch()
        assert not stop.is_made()
        answers.set()
        wait_for(stop.is_made, "the file to be seen")
    assert set(opened) == {tmp_path}


def test_error_record(tmp_path):
    run = RunDirectory(tmp_path, 2)
    try:
        raise ValueError("broken\nin two lines")
    except ValueError as error:
        record_failure(run, 3, "rank 3 (pp 1, dp 0, tp 1)", 17, error)
    found = json.loads((tmp_path / "attempts/2/errors/rank-00003.json").read_text())
    assert list(found) == [
        "rank",
        "coordinates",
        "host",
        "iteration",
        "type",
        "message",
        "traceback",
        "consequence",
        "time",
        "exit_code",
        "module",
        "culprits",
    ]
    assert found["consequence"] is False and found["exit_code"] == 1
    assert (found["type"], found["message"]) == ("ValueError", "broken\nin two lines")
    assert "raise ValueError" in found["traceback"]
    record_failure(run, 4, "", 17, PeerFailedError("rank 3 failed"))
    assert not run.error(4).exists()


def test_a_group_cannot_replace_the_records_of_ranks(tmp_path):
    before = os.umask(0o002)
    try:
        write_json(tmp_path / "heartbeats/rank-00000.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "heartbeats").stat().st_mode & 0o777 == 0o755


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1}, durable=True)
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_run_directory_from_variables():
    assert RunDirectory.from_variables({}) is None
    assert RunDirectory.from_variables({"LLMCTL_RUN_DIR": "/r", "LLMCTL_ATTEMPT": "4"}).attempt == 4
    with pytest.raises(ValueError, match="LLMCTL_ATTEMPT=x"):
        RunDirectory.from_variables({"LLMCTL_RUN_DIR": "/r", "LLMCTL_ATTEMPT": "x"})
