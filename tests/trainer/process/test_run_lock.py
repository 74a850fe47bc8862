"""The lock of a run directory, and ranks whose launcher is killed: real processes, stopped and killed by signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import HANG_S, wait_for
from trainer.process import run_lock
from trainer.process.run_lock import LockedRunError, LostLockError, RunLock

HOLDER = """
import sys
from pathlib import Path
from trainer.process import run_lock
run_lock.time.time_ns = lambda: 10**9
lock = run_lock.RunLock(Path(sys.argv[1]), renew_s=0.05)
lock.acquire()
print("held", flush=True)
for line in sys.stdin:
    try:
        lock.check()
        print("still held", flush=True)
    except run_lock.LostLockError as error:
        print(error, flush=True)
"""
LAUNCHER = """
import subprocess, sys, time
child = "import os, time; from trainer.process.orphan import end_with_parent; end_with_parent(os.getppid());"
child += "print(os.getpid(), flush=True); time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", child]); time.sleep(1000)
"""


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""A PID namespace of its own, as in a container."""
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can make a PID namespace"
)


def start(program, *arguments, prefix=()):
    argv = [*prefix, sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def holding(folder, prefix=()):
    """A process that holds the lock, whose clock stands still in the year 1970. Each line to it asks for a check."""
    with start(HOLDER, folder, prefix=prefix) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()


def says(holder):
    holder.stdin.write("\n")
    holder.stdin.flush()
    return holder.stdout.readline()


def inner_pid(holder):
    """Process id, outside, of the Python process in the container."""
    return int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())


def test_a_living_holder_is_named_and_a_killed_one_forgotten(tmp_path):
    folder = tmp_path / "lock"
    with holding(folder) as holder, pytest.raises(LockedRunError, match=rf"process {holder.pid} on \S+ still trains"):
        RunLock(folder, ending_s=0.1).acquire()
    with RunLock(folder, ending_s=0.1) as lock:
        lock.acquire()
        assert lock.token == 2
        assert json.loads((folder / "2.json").read_text())["pid"] == os.getpid()
    assert sorted(path.name for path in folder.iterdir()) == ["1.json", "2.json"]


def test_a_lock_that_was_given_back_is_taken_at_once_with_the_next_token(tmp_path):
    for token in (1, 2, 3):
        with RunLock(tmp_path) as lock:
            lock.acquire()
            assert lock.token == token
            lock.check()


@needs_root
def test_a_living_holder_in_a_container_of_this_host_is_not_taken_for_dead(tmp_path):
    """Its clock is decades behind: only that its time changes counts, whatever the time is."""
    with holding(tmp_path, CONTAINER), pytest.raises(LockedRunError, match="process 1 on .* still trains"):
        RunLock(tmp_path, stale_s=HANG_S).acquire()


@needs_root
def test_a_holder_that_stood_still_notices_that_it_lost_the_lock(tmp_path):
    with holding(tmp_path, CONTAINER) as holder:
        assert says(holder) == "still held\n"
        os.kill(inner_pid(holder), signal.SIGSTOP)
        with RunLock(tmp_path, stale_s=0.5) as lock:
            lock.acquire()
            assert lock.token == 2
            os.kill(inner_pid(holder), signal.SIGCONT)
            assert f"process {os.getpid()} on " in (found := says(holder))
            assert "has taken this run over; this process writes nothing more" in found
            lock.check()


def write_foreign(folder, token):
    values = {"host": "node7", "boot_id": "another", "pid_namespace": 1, "pid": 1, "start": 1, "nonce": "theirs"}
    (folder / f"{token}.json").write_text(json.dumps(values))


@pytest.mark.parametrize("hours", [-2, 0, 2])
def test_a_holder_elsewhere_is_judged_by_changes_whatever_the_clocks(tmp_path, hours, monkeypatch):
    write_foreign(tmp_path, 4)
    now = time.time() + 3600 * hours
    os.utime(tmp_path / "4.json", (now, now))
    times = iter(range(100))
    with monkeypatch.context() as patch:
        patch.setattr(run_lock, "_renewed", lambda _: next(times))
        with pytest.raises(LockedRunError, match="process 1 on node7"):
            RunLock(tmp_path, stale_s=HANG_S).acquire()
    with RunLock(tmp_path, stale_s=0.1) as lock:
        lock.acquire()
        assert lock.token == 5


def test_a_stalled_look_is_no_sign_of_death(tmp_path, monkeypatch):
    """The file server stands still for an hour, for the holder as well as for this process."""
    write_foreign(tmp_path, 1)
    hours = iter(range(0, 3600 * 100, 3600))
    times = iter([0, 0, 1])
    monkeypatch.setattr(run_lock.time, "monotonic", lambda: float(next(hours)))
    monkeypatch.setattr(run_lock, "_renewed", lambda _: next(times))
    with pytest.raises(LockedRunError, match="process 1 on node7"):
        RunLock(tmp_path).acquire()


def test_only_one_of_two_takers_wins(tmp_path, monkeypatch):
    """Another takes the dead holder's lock first; then its own process is asked for."""
    write_foreign(tmp_path, 1)
    wait = RunLock._wait_for_end

    def overtaken(lock, token):
        if token == 1:
            write_foreign(tmp_path, 2)
        wait(lock, token)

    monkeypatch.setattr(RunLock, "_wait_for_end", overtaken)
    times = iter(range(100))
    monkeypatch.setattr(run_lock, "_renewed", lambda _: next(times))
    with pytest.raises(LockedRunError, match="process 1 on node7"):
        RunLock(tmp_path, stale_s=HANG_S).acquire()


def test_a_lock_file_that_was_deleted_counts_as_lost(tmp_path):
    with RunLock(tmp_path) as lock:
        lock.acquire()
        (tmp_path / "1.json").unlink()
        with pytest.raises(LostLockError, match="its lock file .*1.json is gone"):
            lock.check()
        assert lock.is_lost()
        assert lock.is_known_lost


def test_a_folder_that_cannot_be_read_gives_no_answer(tmp_path):
    folder = tmp_path / "lock"
    with RunLock(folder) as lock:
        lock.acquire()
        folder.rename(tmp_path / "away")
        with pytest.raises(FileNotFoundError):
            lock.check()
        assert not lock.is_lost()
        (tmp_path / "away").rename(folder)
        lock.check()


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
