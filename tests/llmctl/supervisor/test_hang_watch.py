"""The watch for hangs: heartbeat files of ranks, and a clock that the test moves."""

import json
from pathlib import Path

import pytest

from llmctl.supervisor.hangs.survivors import FirstFailure
from llmctl.supervisor.hangs.watch import FEW, LOOK_AT_MANY_S, NOTICE_S, HangWatch
from tests.llmctl.supervisor.test_supervisor import ending, run_job, settings
from tests.waiting import HANG_S

DAY_S = 86_400


class Bed:
    """Heartbeats of some ranks, and their watch; each second is one poll."""

    def __init__(self, folder: Path, *, ranks: int = 2, timeout_s: float = 60) -> None:
        self.folder = folder / "heartbeat"
        self.folder.mkdir()
        job = settings(folder, is_training=True, hang_timeout_s=timeout_s)
        self.watch = HangWatch(job, str(folder))
        self.now, self.ranks, self.told = 1000.0, ranks, []
        self.fixed = {"phase": "forward and backward", "iteration": 9, "first_iteration": 1}
        (folder / "metrics.jsonl").write_text('{"iteration": 8, "iteration_time_s": 0.5}\n')

    def beat(self, rank: int, written: float, entered: int, **changes) -> None:
        # Clocks of other hosts: any number may stand there.
        values = {"rank": rank, "host": f"n{rank}", **self.fixed, "time": entered * 7.0, "written": written}
        groups = {"groups": {"dp": [0, entered]}, "inside": {"name": "all_reduce", "group": "dp"}}
        (self.folder / f"rank-{rank:05d}.json").write_text(json.dumps({**values, **groups, **changes}))

    def step(self, seconds: int, *, lives=(), entered=None, **changes) -> None:
        """Poll each second; the ranks in ``lives`` give signs of life."""
        for _ in range(seconds):
            self.now += 1.0
            for rank in lives:
                self.beat(rank, self.now + DAY_S * rank, (entered or {}).get(rank, 1), **changes)
            if self.watch.poll(self.now):
                self.told.append(self.watch.sentence)


@pytest.fixture
def bed(tmp_path):
    return Bed(tmp_path)


def test_a_rank_behind_is_told_once_and_ends_the_attempt(bed):
    for entered in range(1, 5):
        bed.step(1, lives=(0, 1), entered={0: entered, 1: entered})
    assert bed.told == []
    behind = {"lives": (0, 1), "entered": {0: 5, 1: 4}}
    bed.step(7, **behind)
    assert bed.told == []
    bed.step(8, **behind)
    (told,) = bed.told
    assert told.startswith("rank 1 on n1 (phase forward and backward, iteration 9) has not entered all_reduce 5 of dp")
    assert told.endswith("rank 0 waits for it")
    bed.step(40, **behind)
    assert not bed.watch.is_over and bed.watch.notice() == ""
    bed.step(30, **behind)
    assert bed.watch.is_over
    assert bed.watch.notice() == f"hangs: {bed.watch.sentence}" and bed.watch.notice() == ""
    assert len(bed.told) == 1


def test_progress_ends_a_hang_and_people_hear_of_the_next_after_three_times_as_long(tmp_path):
    bed = Bed(tmp_path, timeout_s=0)
    hang = {"lives": (0, 1), "entered": {0: 5, 1: 4}}
    bed.step(100, **hang)
    assert bed.watch.notice() != ""
    bed.step(2, lives=(0, 1), entered={0: 6, 1: 6})
    assert bed.watch.sentence == ""
    bed.step(200, lives=(0, 1), entered={0: 7, 1: 6})
    assert len(bed.told) == 2 and bed.watch.notice() == ""
    bed.step(200, lives=(0, 1), entered={0: 7, 1: 6})
    assert bed.watch.notice() != "" and not bed.watch.is_over
    assert NOTICE_S < 100


def test_a_stopped_rank_is_told_from_its_file_alone(bed):
    bed.step(1, lives=(0, 1))
    bed.step(20, lives=(0,), entered={0: 2})
    (told,) = bed.told
    assert told.startswith("rank 1 on n1 (phase forward and backward, iteration 9) is stopped, or its node does not")


@pytest.mark.parametrize(("phase", "patience_s"), [("evaluation", 1800), ("checkpoint", 1800), ("export", 3600)])
def test_phases_have_their_own_patience_beside_the_timeout(bed, phase, patience_s):
    silent = {"lives": (0, 1), "entered": {0: 5, 1: 4}, "phase": phase}
    bed.step(patience_s, **silent)
    assert bed.told == []
    bed.step(30, **silent)
    assert len(bed.told) == 1 and not bed.watch.is_over
    bed.step(60, **silent)
    assert bed.watch.is_over


def test_a_rank_without_peers_stands_still(tmp_path):
    bed = Bed(tmp_path, ranks=1)
    alone = {"lives": (0,), "groups": {}, "inside": {}}
    bed.step(28, **alone)
    assert bed.told == []
    bed.step(10, **alone)
    assert [told.partition(" s: ")[2] for told in bed.told] == [
        "rank 0 on n0 (phase forward and backward, iteration 9)"
    ]
    bed.step(80)
    assert "is stopped, or its node does not answer" in bed.watch.sentence and bed.watch.is_over


def test_a_suspended_job_does_not_hang(bed):
    """The scheduler stopped this process with the ranks: the time in between does not count."""
    bed.step(3, lives=(0, 1))
    bed.now += DAY_S
    bed.step(2)
    assert bed.told == [] and not bed.watch.is_over


def test_many_ranks_are_read_only_while_rank_0_is_silent(tmp_path, monkeypatch):
    bed = Bed(tmp_path)
    for rank in range(FEW + 2):
        bed.beat(rank, 0.0, 1)
    looks = []
    monkeypatch.setattr(
        bed.watch, "_names", lambda: looks.append(bed.now) or [f"rank-{rank:05d}.json" for rank in range(FEW + 2)]
    )
    for entered in range(1, 30):
        bed.step(1, lives=(0,), entered={0: entered})
    assert looks == []
    bed.step(21, lives=(0,), entered={0: 29})
    assert [b - a for a, b in zip(looks, looks[1:], strict=False)] == [LOOK_AT_MANY_S] * (len(looks) - 1)
    assert len(looks) == 4


@pytest.mark.parametrize(
    ("record", "is_one"),
    [
        ({"ended-node-00001.json": {"code": 0}}, False),
        ({"ended-node-00001.json": {"code": 1}}, True),
        ({"errors/rank-00001.json": {"consequence": True, "time": 1.0, "exit_code": 1}}, False),
        ({"errors/rank-00001.json": {"consequence": False, "time": 1.0, "exit_code": 1}}, True),
    ],
)
def test_the_first_failure_of_a_part(tmp_path, record, is_one):
    (tmp_path / "errors").mkdir()
    failures = FirstFailure(str(tmp_path))
    assert not failures.has_come({"errors"})
    for name, values in record.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert failures.has_come({"errors", *(name for name in record if "/" not in name)}) == is_one


def test_a_launcher_that_outlives_a_failed_rank_is_ended(tmp_path):
    """Such as one whose other ranks are stopped, or wait in a collective for the one that is gone."""
    script = f"""touch "$LLMCTL_HOSTFILE"
echo '{{"code": 7, "time": 5}}' >"$LLMCTL_ATTEMPT_DIR/ended-node-00001.json"
trap '' TERM
bash -c 'kill -STOP $$; exit 9' &
sleep {HANG_S}
"""
    job = run_job(tmp_path, script, is_training=True, stop_grace_s=int(HANG_S))
    assert job.wait(HANG_S / 2) == 7
    assert ending(tmp_path)["reason"] == "failed"


def test_a_node_that_the_network_cuts_off_is_a_cause(tmp_path):
    bed = Bed(tmp_path, ranks=3, timeout_s=0)
    silent = {0: [], 1: ["10.0.0.2"], 2: ["10.0.0.0", "10.0.0.1"]}
    for _ in range(20):
        for rank, peers in silent.items():
            network = {"addresses": [f"10.0.0.{rank}"], "unanswered": [[peer, 48, 5, 6.0] for peer in peers]}
            bed.beat(rank, bed.now, 1, network=network)
        bed.step(1)
    assert bed.watch.sentence.startswith("n2 (rank 2) does not answer: n1 has sent to it for ")
    assert bed.watch.ranks == (2,)
