"""The flight records of a hang, which torch's own reader and llmctl's understand."""

import subprocess
import sys
import threading
from pathlib import Path

from llmctl.runs.failures.flight_records import guilty_by_flight_records
from llmctl.transport.local import LocalTransport
from tests.trainer.training.pretraining_job import Job
from tests.trainer.training.test_endings import write_config
from tests.waiting import wait_for
from trainer.process.stacks import WANTED


def stand_still_in_third_iteration():
    from trainer.training import loop

    forward_backward, steps = loop.forward_backward, []

    def step(*arguments, **named):
        steps.append(None)
        if len(steps) == 3:
            threading.Event().wait()
        return forward_backward(*arguments, **named)

    loop.forward_backward = step


def test_both_readers_name_the_rank_that_the_others_wait_for(tmp_path):
    run = tmp_path / "run"
    write_config(run, training={"train_iters": 8})
    records = [run / f"attempts/1/flight/rank_{rank}" for rank in range(2)]
    with Job(run, 2, {1: stand_still_in_third_iteration}) as job:
        job.wait_for_iteration(2)
        (run / "attempts/1" / WANTED).write_text("1")
        wait_for(lambda: all(path.exists() for path in records), "the flight records")
    guilty = guilty_by_flight_records(str(records[0].parent), LocalTransport({}))
    assert len(guilty) == 1
    assert guilty[0].startswith("rank 1 holds the others up: it has not entered ")
    assert sorted(records[0].parent.iterdir()) == records
    reader = Path(sys.executable).with_name("torchfrtrace")
    read = subprocess.run([reader, "-p", "rank_", records[0].parent], capture_output=True, text=True, check=True)
    assert "missing ranks: {1}" in read.stdout + read.stderr
