"""A run on raw text has the same losses when resumed in another layout.

No process is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.resume_torture import BASE
from tests.trainer.training.pretraining_job import Job
from tests.waiting import HANG_S

ITERATIONS = 8
KILLED_AT = 5


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    documents = (" ".join(str(number * place % 249) for place in range(1 + number * 13 % 70)) for number in range(900))
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def begin(folder: Path, text: Path, num_workers: int = 1, train_iters: int = ITERATIONS, **parallel: Any) -> Path:
    """Write the config of a run on ``text``, and return the run directory."""
    data = {
        "streaming": True,
        "data_path": str(text),
        "tokenizer_type": "NullTokenizer",
        "num_workers": num_workers,
        "split": "90,10",
        "streaming_buffer_mib": 1,
        "reset_attention_mask": True,
    }
    training = {**BASE["training"], "train_iters": train_iters, "eval_interval": 4}
    sections = {**BASE, "data": data, "training": training, "parallel": {**BASE["parallel"], **parallel}}
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))
    return folder


def die() -> None:
    """Kill this rank mid-run, after a checkpoint was written, while text is read ahead."""
    from trainer.training.loop import TrainingLoop

    log = TrainingLoop._log

    def log_and_die(loop: TrainingLoop, *arguments: Any, **keywords: Any) -> None:
        log(loop, *arguments, **keywords)
        if loop.progress.iteration == KILLED_AT:
            assert processes_of(Path(os.environ["LLMCTL_RUN_DIR"])), "no process encodes"
            os.kill(os.getpid(), signal.SIGKILL)

    TrainingLoop._log = log_and_die  # type: ignore[assignment]


def losses(run: Path) -> dict[tuple[int, str], float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("lm_loss", "valid_loss")
    return {(row["iteration"], key): row[key] for row in rows for key in keys if row.get(key) is not None}


def processes_of(run: Path) -> list[int]:
    """Return the processes of a run, found by the run directory in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if b"LLMCTL_RUN_DIR=" + bytes(run) + b"\0" in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def left_after(run: Path) -> list[int]:
    end = time.monotonic() + HANG_S
    while (found := processes_of(run)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def test_a_killed_run_resumes_in_another_layout(tmp_path: Path, text: Path) -> None:
    whole = begin(tmp_path / "whole", text)
    with Job(whole, 1) as job:
        assert job.ends([0]) == [0]
    expected = losses(whole)
    assert len(expected) == ITERATIONS + 2
    run = begin(tmp_path / "run", text, tensor_model_parallel_size=2)
    with Job(run, 2, faults={0: die}) as job:
        assert job.ends([0]) == [-signal.SIGKILL]
    # All ranks were killed, so their worker processes must end.
    assert left_after(run) == []
    begin(run, text, pipeline_model_parallel_size=2)
    with Job(run, 2, number=2) as job:
        assert job.ends([0, 1]) == [0, 0]
    assert left_after(run) == []
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert min(row["iteration"] for row in rows if row["attempt"] == 2) == KILLED_AT  # resumed, not restarted
    assert losses(run) == pytest.approx(expected, abs=2e-5)


def test_a_broken_line_ends_the_run_and_its_processes(tmp_path: Path, text: Path) -> None:
    with text.open("a") as file:
        file.write("{broken\n")
    run = begin(tmp_path / "run", text)
    with Job(run, 1) as job:
        assert job.ends([0]) == [3]
    assert left_after(run) == []
    (log,) = run.rglob("rank-*.log")
    assert f"{text}:901: is not a line of JSON" in log.read_text()


def lose_workers() -> None:
    """Kill this rank's workers at their first piece, as the OOM killer might."""
    from trainer.data.streaming.workers import _Worker

    give = _Worker.give

    def give_and_end(worker: _Worker, *arguments: Any) -> None:
        give(worker, *arguments)
        assert worker._process.pid is not None
        os.kill(worker._process.pid, signal.SIGKILL)

    _Worker.give = give_and_end  # type: ignore[method-assign]


def test_a_lost_process_ends_all_ranks(tmp_path: Path, text: Path) -> None:
    run = begin(tmp_path / "run", text, tensor_model_parallel_size=2)
    with Job(run, 2, faults={0: lose_workers}) as job:
        assert job.ends([0, 1]) == [1, 1]  # not an error of the config
    assert left_after(run) == []
    first, second = ((run / "attempts/1" / f"rank-0000{rank}.log").read_text() for rank in range(2))
    why = f"was ended by signal 9 (SIGKILL) while it encoded {text}; the machine may be out of memory"
    assert first.count(why) == 1 and "Traceback" not in first
    assert "peer failure in" in second


def test_a_resume_with_another_model_or_length_is_a_config_error(tmp_path: Path, text: Path) -> None:
    run = begin(tmp_path / "run", text)
    asked = yaml.safe_load((run / "config.yaml").read_text())
    number = 0

    def attempt(section: str, **changes: Any) -> tuple[list[int], str]:
        nonlocal number
        number += 1
        (run / "config.yaml").write_text(yaml.safe_dump({**asked, section: {**asked[section], **changes}}))
        with Job(run, 1, number=number) as job:
            return job.ends([0]), (run / f"attempts/{number}/rank-00000.log").read_text()

    assert attempt("training", train_iters=4)[0] == [0]
    refusals = (attempt("model", vocab_size=260), attempt("training", seq_length=16))
    says = ("of shape [251, 64], but this model needs [261, 64]", "training.seq_length")
    for (codes, log), told in zip(refusals, says, strict=True):
        assert codes == [3] and told in log and "Traceback" not in log


def test_an_interrupt_ends_the_run_at_once_without_a_traceback(tmp_path: Path, text: Path) -> None:
    """Ctrl-C in a terminal reaches all of its processes."""
    run = begin(tmp_path / "run", text, train_iters=100_000, num_workers=2)
    with Job(run, 1) as job:
        job.wait_for_iteration(2)
        encoding = processes_of(run)
        assert encoding
        for pid in [*encoding, job.ranks[0].pid]:
            os.kill(pid, signal.SIGINT)
        assert job.ends([0]) == [130]
    assert left_after(run) == []
    log = (run / "attempts/1/rank-00000.log").read_text()
    assert log.endswith("trainer: interrupted\n") and "Traceback" not in log
