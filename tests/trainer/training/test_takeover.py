"""A run that another attempt takes over while the first stands still: real ranks, stopped by SIGSTOP."""

from __future__ import annotations

import json
import os
import signal
from functools import partial

from tests.trainer.training.pretraining_job import Job
from tests.trainer.training.test_async_run import Gate
from tests.waiting import wait_for
from trainer.checkpoint.directory import checkpoint_path, complete_iterations, find_latest
from trainer.checkpoint.metadata import load_metadata


def write_config(run, is_async=False):
    values = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100},
        "parallel": {"tensor_model_parallel_size": 2},
        "training": {"train_iters": 1_000_000, "seq_length": 16, "eval_iters": 0},
        "optimizer": {"lr": 1e-3},
        "data": {"mock_data": True},
        "checkpoint": {"save_interval": 5, "keep_last": 3, "async_save": is_async},
    }
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(values))


def be_elsewhere():
    """Take the lock as a process of another host, with a short wait for a holder that stands still."""
    from trainer.process import run_lock
    from trainer.training import pretraining

    host = f"host of {os.getpid()}"
    run_lock._boot_id = lambda: host
    pretraining.RunLock = partial(run_lock.RunLock, stale_s=1.0, renew_s=0.05)


def rows(run):
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def test_a_stopped_attempt_writes_nothing_after_another_took_the_run_over(tmp_path):
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    write_config(run)
    with Job(run, 2, {0: be_elsewhere}) as first:
        wait_for(lambda: complete_iterations(checkpoints), "a checkpoint")
        os.kill(first.ranks[0].pid, signal.SIGSTOP)
        with Job(run, 2, {0: be_elsewhere}, number=2) as second:
            wait_for(lambda: rows(run)[-1]["attempt"] == 2, "the second attempt")
            os.kill(first.ranks[0].pid, signal.SIGCONT)
            assert first.ends([0, 1]) == [1, 1]
            begin = rows(run)[-1]["iteration"]
            wait_for(lambda: complete_iterations(checkpoints)[-1] > begin, "a save of the second attempt")
            (run / "attempts/2/stop").touch()
            assert second.ends([0, 1]) == [0, 0]
            taker = second.ranks[0].pid
    error = json.loads((run / "attempts/1/errors/rank-00000.json").read_text())
    assert error["type"] == "LostLockError"
    assert f"process {taker} on " in error["message"]
    assert "has taken this run over; this process writes nothing more" in error["message"]
    assert not (run / "attempts/1/errors/rank-00001.json").exists()
    assert not (run / "attempts/1/outcome.json").exists()
    tokens = [row["fencing_token"] for row in rows(run)]
    assert tokens == sorted(tokens) == [row["attempt"] for row in rows(run)]
    assert set(tokens) == {1, 2}
    latest, note = find_latest(checkpoints)
    assert latest == checkpoint_path(checkpoints, complete_iterations(checkpoints)[-1])
    assert note is None
    assert load_metadata(latest).fencing_token == 2


def be_elsewhere_behind(gate):
    gate.close()
    be_elsewhere()


def test_an_attempt_that_loses_the_run_while_it_writes_a_save_publishes_nothing(tmp_path):
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", 5)
    checkpoints = run / "checkpoints"
    write_config(run, is_async=True)
    with Job(run, 2, {0: partial(be_elsewhere_behind, gate), 1: gate.close}) as first:
        # The next save is due, and training waits for the one that is being written.
        first.wait_for_iteration(10)
        os.kill(first.ranks[0].pid, signal.SIGSTOP)
        with Job(run, 2, {0: be_elsewhere}, number=2) as second:
            wait_for(lambda: complete_iterations(checkpoints), "a checkpoint of the second attempt")
            (run / "attempts/2/stop").touch()
            assert second.ends([0, 1]) == [0, 0]
            saved = complete_iterations(checkpoints)
            with gate.open():
                os.kill(first.ranks[0].pid, signal.SIGCONT)
                assert first.ends([0, 1]) == [1, 1]
    error = json.loads((run / "attempts/1/errors/rank-00000.json").read_text())
    assert error["type"] == "LostLockError"
    assert ", in drain\n" in error["traceback"]
    assert complete_iterations(checkpoints) == saved
    assert {load_metadata(checkpoint_path(checkpoints, iteration)).fencing_token for iteration in saved} == {2}
    assert [path.name for path in checkpoints.glob(".*")] == []
