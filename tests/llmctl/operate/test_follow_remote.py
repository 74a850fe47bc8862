"""Following over a connection and with a scheduler: missing answers, lost connections, numbers of queries."""

import time

import pytest

from llmctl.errors import FollowedRunFailed, SchedulerError
from llmctl.operate.follow import follow_run
from llmctl.runs.log_selection import LogChoice
from llmctl.transport.local import LocalTransport
from tests.llmctl.run_directories import beat, leave, make_run, outcome


class Lines:
    """Lines shown, and warnings."""

    shows_progress = False

    def __init__(self):
        self.lines, self.warnings = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def show(self, lines):
        self.lines += lines

    def warning(self, text):
        self.warnings.append(text)

    def progress(self, *_):
        raise AssertionError("progress was not requested")


class Far(LocalTransport):
    """This machine as a remote machine: calls are counted, and can fail."""

    host = "login.far"
    is_remote = True

    def __init__(self):
        super().__init__({"PATH": "/usr/bin:/bin"})
        object.__setattr__(self, "reads", [])
        object.__setattr__(self, "failures", [])

    def read_parts(self, reads):
        self.reads.append([read.path for read in reads])
        if self.failures:
            raise self.failures.pop(0)
        return LocalTransport.read_parts(reads)


class Clock:
    """A test clock: sleeping takes no time, and events happen at their time."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.events = []
        self.pauses = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def at(self, when, act):
        self.events.append((when, act))

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds
        assert self.now < 10_000, "does not end"
        for event in [event for event in self.events if event[0] <= self.now]:
            self.events.remove(event)
            event[1]()


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_following_64_ranks_for_a_minute_makes_at_most_two_scheduler_calls(cluster, clock):
    made = cluster.run()
    attempt = made.start_attempt()
    for rank in range(64):
        append(attempt / f"rank-{rank:05d}.log", "hello\n")
        beat(attempt, rank, age_s=0)
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    calls = []
    clock.at(59.0, lambda: calls.append(len(cluster.backend.calls())))
    clock.at(100.0, lambda: leave(attempt, "completed"))
    transport, shown = Far(), Lines()
    assert (
        follow_run(
            made.record, transport, backend=cluster.backend, choice=LogChoice("all"), output=shown, sleep=clock.sleep
        )
        == 0
    )
    assert calls[0] <= 2
    assert len(shown.lines) == 64
    logs = [paths for paths in transport.reads if any(path.endswith(".log") for path in paths)]
    assert {len(paths) for paths in logs} == {64}, "all ranks in one round trip"
    assert max(clock.pauses) == 3.0, "reads become less frequent while there is no output"
    assert len(logs) < 50


def test_a_log_that_grows_is_read_every_second(cluster, clock):
    made = cluster.run()
    attempt = made.start_attempt()
    append(attempt / "rank-00000.log", "first\n")
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    for second in range(30, 40):
        clock.at(second, lambda: append(attempt / "rank-00000.log", "more\n"))
    clock.at(45, lambda: leave(attempt, "completed"))
    follow_run(made.record, Far(), backend=cluster.backend, output=Lines(), sleep=clock.sleep)
    quiet, busy = clock.pauses[:8], clock.pauses[15:]
    assert max(quiet) == 3.0
    assert busy.count(1.0) >= 5


def test_a_lost_connection_gives_one_warning_and_no_line_is_lost_or_repeated(cluster, clock):
    made = cluster.run()
    attempt = made.start_attempt()
    append(attempt / "rank-00000.log", "one\n")
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    transport, shown = Far(), Lines()
    lost = SchedulerError("the connection to login.far was lost", transient=True)
    clock.at(5, lambda: transport.failures.extend([lost] * 4))
    clock.at(5, lambda: append(attempt / "rank-00000.log", "two\n"))
    clock.at(60, lambda: leave(attempt, "completed"))
    assert follow_run(made.record, transport, backend=cluster.backend, output=shown, sleep=clock.sleep) == 0
    assert shown.lines == ["one", "two"]
    assert [line for line in shown.warnings if "connection lost" in line] == [
        f"llmctl: connection lost: {lost.message}; demo-1 is not touched"
    ]
    assert shown.warnings[-1] == "llmctl: connected again to login.far"


def test_a_permanent_error_ends_the_following(cluster, clock):
    made = cluster.run()
    made.start_attempt()
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    transport = Far()
    clock.at(5, lambda: transport.failures.append(SchedulerError("the host key has changed", transient=False)))
    with pytest.raises(SchedulerError, match="host key"):
        follow_run(made.record, transport, backend=cluster.backend, output=Lines(), sleep=clock.sleep)


def test_a_pending_run_shows_the_reason_and_each_change(cluster, clock):
    made = cluster.run(age_s=300)
    cluster.backend.says("queue", "17|PENDING|job-demo-1|nodes are busy|14:00")
    clock.at(40, lambda: cluster.backend.says("queue", "17|PENDING|job-demo-1|nodes are busy|15:00"))
    clock.at(100, lambda: cluster.backend.says("queue", "17|PENDING|job-demo-1|others go first"))
    clock.at(150, lambda: leave(made.start_attempt(), "completed"))
    shown = Lines()
    assert follow_run(made.record, Far(), backend=cluster.backend, output=shown, sleep=clock.sleep) == 0
    assert shown.warnings == [
        "llmctl: demo-1 pending for 5 min: nodes are busy; expected to start 14:00",
        "llmctl: demo-1 pending for 5 min: others go first",
    ]
    assert len(cluster.backend.calls()) <= 6


def test_following_continues_while_the_scheduler_does_not_answer(cluster, clock):
    made = cluster.run()
    attempt = made.start_attempt()
    cluster.backend.fails("queue", "no route to it")
    clock.at(3600, lambda: outcome(attempt, "stopped", 42))
    clock.at(3600, lambda: leave(attempt, "stopped"))
    shown = Lines()
    with pytest.raises(FollowedRunFailed, match="stopped at iteration 42, saved"):
        follow_run(made.record, Far(), backend=cluster.backend, output=shown, sleep=clock.sleep)
    assert shown.warnings == ["llmctl: demo-1 unknown: the scheduler does not answer: no route to it"]
    assert len(cluster.backend.calls()) <= 3600 / 30 + 1


def test_a_node_failure_is_known_from_the_accounting(cluster, clock):
    made = cluster.run()
    attempt = made.start_attempt()
    beat(attempt, 0, age_s=1000)
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    clock.at(50, lambda: cluster.backend.says("queue"))
    clock.at(100, lambda: cluster.backend.says("accounting", "17|NODE_FAIL|job-demo-1"))
    with pytest.raises(FollowedRunFailed, match="a node failed"):
        follow_run(made.record, Far(), backend=cluster.backend, output=Lines(), sleep=clock.sleep)
    assert len(cluster.backend.calls("accounting")) <= 4


def test_a_run_on_this_machine_is_read_four_times_a_second(tmp_path, clock):
    made = make_run(tmp_path).submit(None)
    clock.at(3, lambda: leave(made.start_attempt(), "completed"))
    assert follow_run(made.record, LocalTransport({}), output=Lines(), sleep=clock.sleep) == 0
    assert set(clock.pauses) == {0.25}
