"""The lock of a run directory, and ranks whose launcher is killed: real processes, killed by SIGKILL."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import HANG_S, wait_for
from trainer.process.run_lock import LockedRunError, RunLock

HOLDER = """
import sys, time
from pathlib import Path
from trainer.process.run_lock import RunLock
lock = RunLock(Path(sys.argv[1])); lock.acquire(); print("held", flush=True); time.sleep(1000)
"""
LAUNCHER = """
import subprocess, sys, time
child = "import os, time; from trainer.process.orphan import end_with_parent; end_with_parent(os.getppid());"
child += "print(os.getpid(), flush=True); time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", child]); time.sleep(1000)
"""


def start(program, *arguments):
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def test_a_living_holder_is_named_and_a_killed_one_forgotten(tmp_path):
    path = tmp_path / "lock.json"
    with start(HOLDER, path) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(LockedRunError, match=rf"process {holder.pid} on \S+ still trains in this run"):
                RunLock(path, ending_s=0.1).acquire()
        finally:
            holder.kill()
    with RunLock(path, ending_s=0.1) as lock:
        lock.acquire()
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def write_foreign(path, age_s=0.0):
    path.write_text(json.dumps({"host": "node7", "boot_id": "another", "pid": 1, "start": 1, "token": "theirs"}))
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def test_a_holder_on_another_host_lives_as_long_as_it_renews(tmp_path, monkeypatch):
    path = tmp_path / "lock.json"
    write_foreign(path)
    ages = iter(range(100))
    with monkeypatch.context() as patch:
        patch.setattr(RunLock, "_renewed", lambda _: time.time() + next(ages))
        with pytest.raises(LockedRunError, match="process 1 on node7"):
            RunLock(path, ending_s=0.1).acquire()
    with RunLock(path, stale_s=0.1, ending_s=0.1) as lock:
        lock.acquire()
    write_foreign(path, age_s=100_000)
    with RunLock(path, ending_s=0.1) as lock:
        lock.acquire()


def test_a_lock_that_another_took_is_not_removed(tmp_path):
    path = tmp_path / "lock.json"
    write_foreign(path)
    lock = RunLock(path)
    lock._remove({"token": "an older one"})
    assert json.loads(path.read_text())["token"] == "theirs"
    assert [entry.name for entry in tmp_path.iterdir()] == ["lock.json"]


def test_a_rank_ends_with_its_launcher():
    with start(LAUNCHER) as launcher:
        try:
            rank = int(launcher.stdout.readline())
        finally:
            launcher.kill()
            launcher.wait(timeout=HANG_S)

    def has_ended():
        try:
            return Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    wait_for(has_ended, "end of the orphan")
