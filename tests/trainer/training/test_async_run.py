"""Runs whose saves are written beside the training, and what may happen meanwhile."""

import functools
import hashlib
import json
import os
import resource
import signal

from tests.trainer.training.pretraining_job import Job
from trainer.checkpoint.directory import checkpoint_path, complete_iterations, damage

RANKS = 2


def write_config(run, train_iters, save_interval, is_async=True, **training):
    values = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100},
        "training": {"train_iters": train_iters, "seq_length": 16, "eval_iters": 0, "bf16": True, **training},
        "optimizer": {"lr": 1e-3},
        "data": {"mock_data": True},
        "checkpoint": {"save_interval": save_interval, "async_save": is_async},
        "parallel": {"use_distributed_optimizer": True},
    }
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(values))


class Gate:
    """Holds the drain of one iteration until ``open``. A FIFO: opening it for reading waits for a writer."""

    def __init__(self, path, iteration):
        self.path = path
        self.iteration = iteration
        os.mkfifo(path)

    def close(self):
        """Close it in a rank."""
        from trainer.checkpoint.save import CheckpointWriter

        whole = CheckpointWriter.drain

        def drain(writer, staged, **named):
            if staged.iteration == self.iteration:
                with self.path.open("rb"):
                    pass
            return whole(writer, staged, **named)

        CheckpointWriter.drain = drain

    def open(self):
        """Let every rank pass while the returned file is open."""
        return self.path.open("r+b", buffering=0)

    @property
    def faults(self):
        return {rank: self.close for rank in range(RANKS)}


def tensors(run, iteration):
    folder = checkpoint_path(run / "checkpoints", iteration)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def outcome(run, attempt=1):
    return json.loads((run / f"attempts/{attempt}/outcome.json").read_text())


def log(run, attempt=1):
    return (run / f"attempts/{attempt}/rank-00000.log").read_text()


def reference(tmp_path, **training):
    """The same run with synchronous saves."""
    run = tmp_path / "reference"
    write_config(run, **training, is_async=False)
    with Job(run, RANKS) as job:
        assert job.ends(range(RANKS)) == [0] * RANKS
    return run


def test_steps_go_on_while_a_save_is_written_and_do_not_change_it(tmp_path):
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", 5)
    write_config(run, train_iters=8, save_interval=5)
    with Job(run, RANKS, gate.faults) as job:
        job.wait_for_iteration(8)
        assert complete_iterations(run / "checkpoints") == []
        with gate.open():
            assert job.ends(range(RANKS)) == [0] * RANKS
    assert complete_iterations(run / "checkpoints") == [5, 8]
    other = reference(tmp_path, train_iters=8, save_interval=5)
    for each in (run, other):
        first, last = (row for row in rows(each) if "save_bytes" in row)
        assert (first["iteration"], last["iteration"]) == (5, 8)
        folder = checkpoint_path(each / "checkpoints", 5)
        assert first["save_bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        seconds = [first[f"save_{part}_s"] for part in ("stage", "wait", "drain")]
        # Training waits for all of a synchronous save.
        assert (seconds[0] > 0.0, seconds[1] == seconds[2]) == (each is run, each is other)
        beat = json.loads((each / "attempts/1/heartbeat/rank-00000.json").read_text())
        assert (beat["save"]["iteration"], beat["save"]["bytes"]) == (8, last["save_bytes"])
    assert "saves beside the training: copies of " in log(run)
    assert [tensors(run, iteration) for iteration in (5, 8)] == [tensors(other, iteration) for iteration in (5, 8)]


def test_a_run_killed_while_a_save_is_written_resumes_from_the_one_before(tmp_path):
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", 8)
    write_config(run, train_iters=12, save_interval=4)
    with Job(run, RANKS, gate.faults) as job:
        job.wait_for_iteration(10)
        assert complete_iterations(run / "checkpoints") == [4]
    with Job(run, RANKS, number=2) as job:
        assert job.ends(range(RANKS)) == [0] * RANKS
    assert "at iteration 4" in log(run, 2)
    other = reference(tmp_path, train_iters=12, save_interval=4)
    assert tensors(run, 12) == tensors(other, 12)
    assert complete_iterations(run / "checkpoints") == [4, 8, 12]


def test_a_stop_request_while_a_save_is_written_saves_the_later_step_too(tmp_path):
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", 5)
    write_config(run, train_iters=100000, save_interval=5)
    with Job(run, RANKS, gate.faults) as job:
        job.wait_for_iteration(7)
        os.kill(job.ranks[1].pid, signal.SIGTERM)
        with gate.open():
            assert job.ends(range(RANKS)) == [0] * RANKS
    stopped = outcome(run)
    assert stopped["reason"] == "stopped"
    complete = complete_iterations(run / "checkpoints")
    assert complete[0] == 5 and complete[-1] == stopped["iteration"] > 7
    assert all(damage(checkpoint_path(run / "checkpoints", iteration)) is None for iteration in complete)


def refuse_first_drain():
    from trainer.checkpoint.save import CheckpointWriter

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = CheckpointWriter.drain

    def drain(writer, staged, **named):
        is_first = staged.iteration == 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if is_first else limits[0], limits[1]))
        try:
            return whole(writer, staged, **named)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    CheckpointWriter.drain = drain


def test_a_save_that_the_disk_refuses_does_not_kill_the_run(tmp_path):
    run = tmp_path / "run"
    write_config(run, train_iters=6, save_interval=2)
    with Job(run, RANKS, {1: refuse_first_drain}) as job:
        assert job.ends(range(RANKS)) == [0] * RANKS
    missed = [row for row in rows(run) if "missed_save" in row]
    assert [row["iteration"] for row in missed] == [2]
    assert "File too large" in missed[0]["missed_save"]
    assert complete_iterations(run / "checkpoints") == [4, 6]


def die_in_drain():
    from trainer.checkpoint.save import CheckpointWriter

    CheckpointWriter.drain = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_in_a_drain_is_named(tmp_path):
    run = tmp_path / "run"
    write_config(run, train_iters=100000, save_interval=2)
    with Job(run, RANKS, {1: die_in_drain}) as job:
        assert job.ends(range(RANKS)) == [1, -signal.SIGKILL]
    error = json.loads((run / "attempts/1/errors/rank-00000.json").read_text())
    assert error["consequence"]
    assert "no error record from rank 1 (" in error["message"]


def spoil(gate, first):
    """Close the gate, and make every gradient from the iteration ``first`` on useless."""
    from trainer.training import loop

    gate.close()
    whole = loop.forward_backward
    calls = iter(range(1, 1000))

    def spoiled(*arguments, loss_scale, **named):
        return whole(*arguments, loss_scale=float("nan") if next(calls) >= first else loss_scale, **named)

    loop.forward_backward = spoiled


def test_a_run_that_ends_by_useless_steps_completes_the_save_before_them(tmp_path):
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", 2)
    write_config(run, train_iters=100, save_interval=2, max_skipped_steps=5)
    fault = functools.partial(spoil, gate, 3)
    with Job(run, RANKS, dict.fromkeys(range(RANKS), fault)) as job:
        job.wait_for_iteration(6)
        with gate.open():
            assert job.ends(range(RANKS)) == [1] * RANKS
    assert complete_iterations(run / "checkpoints") == [2]
