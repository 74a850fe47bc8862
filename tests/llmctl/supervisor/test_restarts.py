"""Classes of failures, and the decision to begin again, as tables."""

import json

import pytest

from llmctl.supervisor.ends import PartEnd
from llmctl.supervisor.restarts import (
    Failure,
    History,
    RankFailure,
    Reached,
    class_of,
    fruitless_attempts,
    read_history,
    read_rank_failures,
    read_reached,
    refusal,
)
from tests.llmctl.supervisor.test_supervisor import ending, run_job, settings
from tests.waiting import HANG_S

LOST = RankFailure("RuntimeError", "peer failure in 'agreement' (rank 1): Connection closed by peer", True, 1, 1.0)
KILLED = PartEnd(137, 9, 5.0, "n2")
ENDED = PartEnd(143, 15, 5.0, "n2")


def error(kind: str, message: str = "", code: int = 1, when: float = 2.0) -> RankFailure:
    return RankFailure(kind, message, False, code, when)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(137, ranks=(LOST,)), "killed"),
        (Failure(1, ranks=(LOST,), parts=(KILLED,)), "killed"),
        (Failure(139), "killed"),
        (Failure(143), "killed"),
        (Failure(143, ranks=(LOST,), parts=(ENDED,)), "lost_peer"),
        (Failure(1, ranks=(LOST, LOST)), "lost_peer"),
        (Failure(1, ranks=(LOST,), lost_node=True), "node"),
        (Failure(143, parts=(ENDED,), lost_node=True), "node"),
        (Failure(137, ranks=(LOST,), verdict="hang"), "hang"),
        (Failure(1, ranks=(LOST, error("NonFiniteError", "losses of the last 10 steps"))), "not_finite"),
        (Failure(1, ranks=(error("OutOfMemoryError", "CUDA out of memory. Tried to allocate"),)), "out_of_memory"),
        (Failure(1, ranks=(error("MemoryError"),)), "out_of_memory"),
        (Failure(1, ranks=(error("OSError", "[Errno 12] Cannot allocate memory"),)), "out_of_memory"),
        (Failure(1, ranks=(error("CheckpointError", "cannot be written: No space left on device"),)), "disk"),
        (Failure(1, ranks=(error("OSError", "[Errno 122] Disk quota exceeded: 'x'"),)), "disk"),
        (Failure(3, ranks=(error("DataError", "data.data_path: no file", 3),)), "config"),
        (Failure(2), "config"),
        (Failure(1, ranks=(error("ZeroDivisionError", when=1.0), error("ConfigError", code=3))), "error"),
        (Failure(1, ranks=(error("AcceleratorError", "CUDA error: an illegal memory access"), LOST)), "error"),
        (Failure(1), "unknown"),
        (Failure(3, is_training=False), "error"),
        (Failure(137, is_training=False), "killed"),
    ],
)
def test_the_class_of_a_failure(failure, expected):
    assert class_of(failure) == expected


def reached(*pairs: tuple[int, int]) -> tuple[Reached, ...]:
    return tuple(Reached(number, *pair) for number, pair in enumerate(pairs, 1))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(100, 90)], ()),
        ([(0, 0)], (1,)),
        ([(0, 0), (0, 0)], (1, 2)),
        ([(100, 90), (100, 90)], (2,)),
        ([(100, 90), (100, 90), (97, 90)], (2, 3)),
        ([(100, 50), (90, 70), (90, 70)], (3,)),
        ([(100, 90), (90, 90), (101, 90)], ()),
    ],
)
def test_attempts_without_a_new_step(pairs, expected):
    assert fruitless_attempts(reached(*pairs)) == expected


ON = ("killed", "lost_peer")


@pytest.mark.parametrize(
    ("failure_class", "history", "left_s", "why"),
    [
        ("killed", History(reached((5, 0)), 0), None, ""),
        ("lost_peer", History(reached((5, 0), (5, 4), (6, 4)), 2), 60.0, ""),
        ("killed", History(reached((5, 0)), 3), None, "job.max_restarts 3 is used up"),
        ("killed", History(reached((5, 0)), 0), 42.4, "42 s are left before the time limit"),
        ("killed", History(reached((5, 0)), 0), -3.0, "0 s are left before the time limit"),
        ("config", History(reached((0, 0)), 0), None, "a new attempt would meet the same error of the config"),
        ("disk", History(reached((5, 0)), 0), None, "the disk is full, or a quota is used up"),
        (
            "not_finite",
            History(reached((5, 0)), 0),
            None,
            "not_finite is not one of job.restart_on (killed, lost_peer)",
        ),
        (
            "killed",
            History(reached((7, 5), (7, 5), (6, 5)), 2),
            None,
            "attempts 2 and 3 have trained and saved nothing beyond iteration 7",
        ),
    ],
)
def test_the_reason_of_a_last_attempt(tmp_path, failure_class, history, left_s, why):
    job = settings(tmp_path, is_training=True, max_restarts=3, restart_on=ON)
    assert refusal(job, failure_class, history, left_s) == why


def test_a_command_has_no_steps_that_could_be_missing(tmp_path):
    job = settings(tmp_path, is_training=False, max_restarts=3, restart_on=("error",))
    assert refusal(job, "error", History(reached((0, 0), (0, 0)), 1), None) == ""


def test_the_facts_come_from_the_run_directory(tmp_path):
    job = settings(tmp_path, submission=2)
    for number, submission, trained, restarts in ((1, 1, 4, True), (2, 2, 8, True), (3, 2, 8, False)):
        folder = tmp_path / f"attempts/{number}"
        folder.mkdir(parents=True)
        (folder / "started.json").write_text(json.dumps({"submission": submission}))
        values = {"trained": trained, "saved": 2, "restarts": restarts}
        (folder / "exit.json").write_text(json.dumps(values))
    for name, text in (("4/heartbeat", '{"iteration": 9}'), ("4/errors", '{"consequence": fal')):
        (tmp_path / "attempts" / name).mkdir(parents=True)
        (tmp_path / "attempts" / name / "rank-00000.json").write_text(text)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 11}\n{"iteration": 12}\n{"iterat')
    (tmp_path / "saved.json").write_text('{"iteration": 10}')
    ended = read_reached(str(tmp_path), 4)
    assert ended == Reached(4, 12, 10)
    assert read_history(job, ended) == History((Reached(1, 4, 2), Reached(2, 8, 2), Reached(3, 8, 2), ended), 1)
    assert read_rank_failures(str(tmp_path / "attempts/4")) == ()


def test_exit_json_names_the_class_and_the_progress(tmp_path):
    job = run_job(tmp_path, 'touch "$LLMCTL_HOSTFILE"; kill -SEGV $$\n', is_training=True)
    assert job.wait(HANG_S) == 139
    found = ending(tmp_path)
    assert (found["class"], found["trained"], found["saved"]) == ("killed", 0, 0)
