"""Runs that are killed between two saves and go on from the copies of their nodes."""

import functools
import json
import resource
import signal

import pytest

from tests.trainer.training.pretraining_job import Job
from tests.trainer.training.test_async_run import log, rows, tensors
from trainer.checkpoint.directory import complete_iterations
from trainer.process.run_directory import write_json

RANKS = 2


def write_config(run, copies, **checkpoint):
    values = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100},
        "training": {"train_iters": 14, "seq_length": 16, "eval_iters": 0, "bf16": True},
        "optimizer": {"lr": 1e-3},
        "data": {"mock_data": True},
        "checkpoint": {"save_interval": 8, **checkpoint},
        "parallel": {"use_distributed_optimizer": True},
    }
    if copies is not None:
        values["checkpoint"] |= {"copy_interval": 3, "copy_folder": str(copies)}
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(values))


def losses(run):
    return {row["iteration"]: row["lm_loss"] for row in rows(run) if "lm_loss" in row}


def kill_at(iteration, after=0):
    """Kill this process as soon as it has computed this iteration, and the copy of iteration ``after`` is complete."""
    import os
    import signal

    from trainer.training.loop import TrainingLoop

    whole = TrainingLoop._iterate

    def iterate(loop):
        asked = whole(loop)
        if loop.progress.iteration == iteration:
            if after:
                loop._saving._copying._draining.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return asked

    TrainingLoop._iterate = iterate


def whole_run(tmp_path):
    """The same run without copies and faults."""
    run = tmp_path / "whole"
    write_config(run, None)
    with Job(run, RANKS) as job:
        assert job.ends(range(RANKS)) == [0] * RANKS
    return run


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_is_killed_between_two_saves_goes_on_from_its_copies(tmp_path, is_async):
    run, copies = tmp_path / "run", tmp_path / "copies"
    write_config(run, copies, async_save=is_async)
    fault = functools.partial(kill_at, 11, after=9)
    with Job(run, RANKS, dict.fromkeys(range(RANKS), fault)) as job:
        assert job.ends(range(RANKS)) == [-signal.SIGKILL] * RANKS
    assert len(list((copies / "llmctl-copies-run").glob("*.json"))) == RANKS
    with Job(run, RANKS, number=2) as job:
        assert job.ends(range(RANKS)) == [0] * RANKS
    line = f"goes on from the copies of iteration 9 in {copies}; the newest checkpoint is that of iteration 8"
    assert line in log(run, 2) and f"resuming from {copies} at iteration 9" in log(run, 2)
    assert [row["iteration"] for row in rows(run) if row["attempt"] == 2 and "lm_loss" in row] == [*range(10, 15)]
    assert losses(run) == losses(whole := whole_run(tmp_path))
    assert tensors(run, 14) == tensors(whole, 14)
    # At the end of the run nothing is left.
    assert list(copies.iterdir()) == []
    copied = [row for row in rows(run) if "copy_bytes" in row]
    assert {(row["iteration"], row["attempt"]) for row in copied} >= {(3, 1), (6, 1), (12, 2)}
    assert all(row["copy_bytes"] > 0 < row["copy_stage_s"] and row["copy_drain_s"] > 0 for row in copied)
    assert "copies of the state take " in log(run) and f"iteration 3 copied to {copies}, in " in log(run)


def test_copies_serve_a_run_that_has_no_checkpoint_yet(tmp_path):
    run, copies = tmp_path / "run", tmp_path / "copies"
    write_config(run, copies)
    fault = functools.partial(kill_at, 5, after=3)
    with Job(run, RANKS, dict.fromkeys(range(RANKS), fault)) as job:
        job.ends(range(RANKS))
    with Job(run, RANKS, number=2) as job:
        assert job.ends(range(RANKS)) == [0] * RANKS
    assert f"goes on from the copies of iteration 3 in {copies}; the newest checkpoint is none" in log(run, 2)
    assert losses(run) == losses(whole_run(tmp_path))


def refuse_copies():
    """Let this rank write a few bytes only while it writes a copy."""
    from trainer.checkpoint.copies.state_copies import StateCopies

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = StateCopies.drain

    def drain(copies, staged):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            return whole(copies, staged)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    StateCopies.drain = drain


def test_a_full_folder_ends_the_copies_and_not_the_run(tmp_path):
    run, copies = tmp_path / "run", tmp_path / "copies"
    write_config(run, copies)
    with Job(run, RANKS, {1: refuse_copies}) as job:
        assert job.ends(range(RANKS)) == [0] * RANKS
    told = [line for line in log(run).splitlines() if "no copies are made" in line]
    assert len(told) == 1
    assert told[0].startswith(f"iteration 3: no copies are made any more: {copies} on ")
    assert told[0].endswith(": File too large")
    assert not [row for row in rows(run) if "copy_bytes" in row]
    assert complete_iterations(run / "checkpoints") == [8, 14]


def test_a_folder_that_cannot_be_used_is_told_and_the_run_goes_on(tmp_path):
    run, copies = tmp_path / "run", tmp_path / "copies"
    write_config(run, copies)
    (tmp_path / "elsewhere").mkdir()
    copies.mkdir()
    (copies / "llmctl-copies-run").symlink_to(tmp_path / "elsewhere")
    with Job(run, RANKS) as job:
        assert job.ends(range(RANKS)) == [0] * RANKS
    assert "no copies are made: " in log(run) and "llmctl-copies-run is a link" in log(run)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_copies_are_not_used_after_an_end_by_unsound_weights(tmp_path):
    run, copies = tmp_path / "run", tmp_path / "copies"
    write_config(run, copies)
    fault = functools.partial(kill_at, 11, after=9)
    with Job(run, RANKS, dict.fromkeys(range(RANKS), fault)) as job:
        job.ends(range(RANKS))
    error = {"type": "ReplicaError", "module": "trainer.training.soundness.weight_hashes"}
    write_json(run / "attempts/1/errors/rank-00001.json", error)
    with Job(run, RANKS, number=2) as job:
        assert job.ends(range(RANKS)) == [0] * RANKS
    reason = "attempt 1 has ended by losses or weights that are not sound"
    line = f"goes on from no copy in {copies}: {reason}; the newest checkpoint is that of iteration 8"
    assert line in log(run, 2) and "at iteration 8" in log(run, 2)
    assert list(copies.iterdir()) == []
