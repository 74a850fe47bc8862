"""Worker processes that hang are reported, given up, and never left behind."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.trainer.data.streaming.test_training import begin, left_after
from tests.trainer.training.pretraining_job import Job
from tests.waiting import HANG_S
from trainer.data.errors import DataError, LostWorkerError
from trainer.data.prepare.chunks import rest_of_document
from trainer.data.prepare.inputs import find_inputs
from trainer.data.streaming import text_pieces, workers
from trainer.data.streaming.samples import StreamedSamples
from trainer.data.streaming.text_pieces import Cursor, Pieces
from trainer.data.streaming.work import Reading, Share
from trainer.data.streaming.workers import EncoderPool
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.watchdog import Watchdog

NUMBERS = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=1000)
TIMEOUT_S = 2.0
LIMIT_S = HANG_S
"""Limit of every wait for an expected event."""


@pytest.fixture(params=["text.jsonl", "text.jsonl.gz"])
def text(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """8 MB of text, compressed or not.

    Decompressed text goes to the processes in messages larger than a socket buffer.
    """
    lines = (json.dumps({"text": " ".join(map(str, range(number % 700)))}) + "\n" for number in range(6000))
    content = "".join(lines).encode()
    path = tmp_path / str(request.param)
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path


def samples_of(text: Path, pool: EncoderPool) -> StreamedSamples:
    cut = Pieces(find_inputs([str(text)]), "file", 1, 1 << 20)
    return StreamedSamples(cut, Share(), pool, seq_length=64, seed=5, buffer_bytes=2 << 20, kept=0)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_that_hangs_is_reported_and_then_given_up(text: Path, processes: int) -> None:
    said: list[str] = []
    pool = EncoderPool(processes, NUMBERS, Reading(), patience_s=TIMEOUT_S, say=said.append)
    try:
        samples = samples_of(text, pool)
        samples.sample(0)
        (worker, *_) = pool._all
        os.kill(worker.pid, signal.SIGSTOP)
        who = f"process {worker.pid} of data.num_workers"
        silent = rf"^{who} was stopped by a signal and has been silent for \d+ s while it encodes {text}"
        with pytest.raises(LostWorkerError, match=rf"{silent}; .*resume the run.*$"):
            for number in range(10**6):
                samples.sample(number)
    finally:
        pool.close()
    # On a busy machine a slow start may be reported, too, in another line.
    (line,) = (line for line in said if "silent" in line)
    assert re.match(rf"{silent}; the run ends after 2 s of silence$", line)
    assert worker._process.exitcode == -signal.SIGKILL


def test_a_process_that_dies_during_an_answer_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "1 2 3 4 5 6 7 8 9"}\n' * 40_000)
    pool = EncoderPool(1, NUMBERS, Reading())
    try:
        worker = pool._start()
        ((piece, _), *_) = Pieces(find_inputs([str(text)]), "file", 1, 1 << 30).rest_of_epoch(Cursor())
        worker.give(piece, Share())
        # 1.6 MB exceed the socket buffer, so the sender waits until the rest is read.
        assert worker.connection.poll(LIMIT_S)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(LostWorkerError, match=rf"was ended by signal 9 \(SIGKILL\) while it encoded {text}"):
            worker.receive()
    finally:
        pool.close()


def test_a_wait_for_an_unkillable_process_ends_with_close(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for a disk cannot be killed until the disk answers."""
    monkeypatch.setattr(workers, "_SECONDS_TO_DIE", 0.1)
    pool = EncoderPool(1, NUMBERS, Reading())
    samples = samples_of(text, pool)
    samples.sample(0)
    (worker,) = pool._all
    os.kill(worker.pid, signal.SIGSTOP)
    monkeypatch.setattr(worker._process, "kill", lambda: None)
    try:
        waiting = threading.Thread(target=exhaust, args=(samples,), daemon=True)
        waiting.start()
        closing = threading.Thread(target=pool.close, daemon=True)
        closing.start()
        for thread in (closing, waiting):
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker._process.join(LIMIT_S)


def exhaust(samples: StreamedSamples) -> None:
    """Request samples until an error occurs."""
    with suppress(DataError, RuntimeError, CancelledError):
        for number in range(10**6):
            samples.sample(number)


def test_a_file_that_hangs_while_it_is_decompressed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "1 2 3 4 5 6 7 8 9"}\n' * 200_000))
    may_continue, said = threading.Event(), list[str]()
    is_slow = threading.Event()

    def hang(stream: BinaryIO, by_line: bool) -> Iterator[bytes]:
        if is_slow.is_set():
            may_continue.wait(2 * LIMIT_S)
        return rest_of_document(stream, by_line)

    monkeypatch.setattr(text_pieces, "rest_of_document", hang)
    pool = EncoderPool(1, NUMBERS, Reading(), patience_s=TIMEOUT_S, say=said.append)
    try:
        samples = samples_of(path, pool)
        samples.sample(0)
        is_slow.set()
        silent = rf"^the thread that reads compressed text sleeps and has been silent for \d+ s while it reads {path}; "
        with pytest.raises(LostWorkerError, match=silent):
            for number in range(10**6):
                samples.sample(number)
        pool.close()  # does not wait for the thread
    finally:
        may_continue.set()
        pool.close()
    (line,) = (line for line in said if "silent" in line)
    assert re.match(silent, line)


def stop_workers() -> None:
    """Stop worker processes of this rank when they get their second piece."""
    from trainer.data.streaming.workers import _Worker

    give = _Worker.give

    def give_and_stop(worker: _Worker, *arguments: Any) -> None:
        give(worker, *arguments)
        if worker._has_answered:
            os.kill(worker.pid, signal.SIGSTOP)

    _Worker.give = give_and_stop  # type: ignore[method-assign]


def test_a_run_whose_processes_hang_ends_with_the_reason(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "1 2 3 4 5 6 7 8 9"}\n' * 40_000)
    run = begin(tmp_path / "run", text, train_iters=100_000, distributed_timeout_minutes=0.1)
    with Job(run, 1, faults={0: stop_workers}) as job:
        assert job.ends([0]) == [1]
    assert left_after(run) == []
    log = (run / "attempts/1/rank-00000.log").read_text()
    assert log.count("was stopped by a signal and has been silent for") == 2 and "Traceback" not in log
    record = json.loads((run / "attempts/1/errors/rank-00000.json").read_text())
    assert (record["type"], record["exit_code"], record["consequence"]) == ("LostWorkerError", 1, False)


class Stranger:
    """A process that runs a given program."""

    work = "counts"

    def __init__(self, program: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", program])
        self.pid = self._process.pid
        self.name = f"process {self.pid}"
        self.proc = Path(f"/proc/{self.pid}")
        self.reasons: list[str] = []
        self.is_given_up = threading.Event()

    def give_up(self, reason: str) -> None:
        self.reasons.append(reason)
        self.is_given_up.set()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(LIMIT_S)


@pytest.fixture
def slow() -> Iterator[Stranger]:
    """A process that does a little work every few milliseconds."""
    stranger = Stranger("import time\nwhile True: time.sleep(0.002)")
    yield stranger
    stranger.close()


def test_a_slow_process_is_not_mistaken_for_one_that_hangs(slow: Stranger) -> None:
    said: list[str] = []
    is_long = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        is_long.set()

    watch = Watchdog(TIMEOUT_S, say)
    try:
        watch.begin(slow)
        assert is_long.wait(LIMIT_S)
        assert said[0].startswith(f"process {slow.pid} has been at work for 2 s while it counts")
        os.kill(slow.pid, signal.SIGSTOP)
        assert slow.is_given_up.wait(LIMIT_S)
    finally:
        watch.close()
    assert len(said) == 2 and "the run ends after 2 s of silence" in said[1]
    assert len(slow.reasons) == 1 and "was stopped by a signal and has been silent" in slow.reasons[0]


def test_a_process_that_nobody_waits_for_is_not_reported(slow: Stranger) -> None:
    os.kill(slow.pid, signal.SIGSTOP)
    said: list[str] = []
    watch = Watchdog(0.05, said.append)
    for _ in range(200):
        watch.begin(slow)
        watch.begin(None)
        time.sleep(0.001)
    watch.close()
    assert not said and not slow.reasons


ORPHAN = """
import os, signal, sys
from pathlib import Path
from tests.trainer.data.streaming.test_workers import NUMBERS, samples_of
from trainer.data.streaming.work import Reading
from trainer.data.streaming.workers import EncoderPool

if __name__ == "__main__":
    pool = EncoderPool(1, NUMBERS, Reading())
    samples_of(Path(sys.argv[1]), pool).sample(0)
    (worker,) = pool._all
    os.kill(worker.pid, signal.SIGSTOP)
    print(worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_hangs_does_not_outlive_the_trainer(text: Path, tmp_path: Path) -> None:
    (tmp_path / "orphan.py").write_text(ORPHAN)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "orphan.py"), str(text)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pid, end = int(done.stdout), time.monotonic() + LIMIT_S
    try:
        while _is_alive(pid):
            assert time.monotonic() < end, "the process is left behind"
            time.sleep(0.02)
    finally:
        if _is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    """True if a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
