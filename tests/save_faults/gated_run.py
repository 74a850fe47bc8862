"""A run of one rank that stands still before and after the save of one iteration."""

import contextlib
import json
import os
import shutil
import signal
from multiprocessing.connection import wait

from tests.trainer.training.pretraining_job import Job
from tests.waiting import HANG_S

SAVED, GATED, LAST = 1, 2, 3
"""Iterations: of the checkpoint that is there, of the save that is broken, and of the one after."""
BEFORE, AFTER = b"b", b"a"


def write_config(run, is_async):
    """The smallest model, and a save after each of three iterations, which leaves no older one."""
    values = {
        "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50},
        "training": {"train_iters": LAST, "seq_length": 8, "eval_iters": 0},
        "optimizer": {"lr": 1e-3},
        "data": {"mock_data": True},
        "checkpoint": {"save_interval": 1, "keep_last": 1, "async_save": is_async},
    }
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(values))


class Gates:
    """Two FIFOs, by which a run says where it stands, and is let go."""

    def __init__(self, folder):
        """Make them in ``folder``."""
        folder.mkdir()
        self.said, self.go = folder / "said", folder / "go"
        os.mkfifo(self.said)
        os.mkfifo(self.go)

    def close(self):
        """Close the gates in the rank. ``Job`` calls this in its process."""
        from trainer.checkpoint.save import CheckpointWriter

        stage, drain = CheckpointWriter.stage, CheckpointWriter.drain

        def stage_behind_gate(writer, model, optimizer, progress, memory=None):
            if progress.iteration == GATED:
                self._stand_still(BEFORE)
            return stage(writer, model, optimizer, progress, memory)

        def drain_before_gate(writer, staged, **named):
            try:
                return drain(writer, staged, **named)
            finally:
                if staged.iteration == GATED:
                    self._stand_still(AFTER)

        CheckpointWriter.stage, CheckpointWriter.drain = stage_behind_gate, drain_before_gate

    def _stand_still(self, place):
        self.said.write_bytes(place)
        with self.go.open("rb", buffering=0) as file:
            file.read(1)


class GatedRun:
    """One attempt with both gates. A context manager, which kills it at its end."""

    def __init__(self, run, number, folder):
        """Start attempt ``number``; ``folder`` is made for the FIFOs."""
        self.gates = Gates(folder)
        self._files = contextlib.ExitStack()
        # For both directions: opening waits for nobody then.
        self._said = self._files.enter_context(self.gates.said.open("r+b", buffering=0))
        self._go = self._files.enter_context(self.gates.go.open("r+b", buffering=0))
        self._job = Job(run, 1, {0: self.gates.close}, number=number)
        self._rank = self._job.ranks[0]

    @property
    def pid(self):
        """Process id of the rank."""
        return self._rank.pid

    def reaches(self, place):
        """True at a gate, False if the rank ended before."""
        ready = wait([self._said, self._rank.sentinel], HANG_S)
        assert ready, f"the rank has neither come to gate {place} nor ended"
        if self._said not in ready:
            return False
        assert self._said.read(1) == place
        return True

    def pass_gate(self):
        """Let the rank go on."""
        self._go.write(b"g")

    def ends(self):
        """The exit code, negative for a signal."""
        return self._job.ends([0])[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._job.__exit__()
        self._files.close()
        shutil.rmtree(self.gates.said.parent)


def is_killed(code):
    """True for the exit code of a process that SIGKILL ended."""
    return code == -signal.SIGKILL


def finish(run, number):
    """A whole attempt to the end of the run; its exit code and the output of its rank."""
    with Job(run, 1, number=number) as job:
        code = job.ends([0])[0]
    return code, (run / "attempts" / str(number) / "rank-00000.log").read_text()
