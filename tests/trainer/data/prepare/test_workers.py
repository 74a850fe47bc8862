"""Worker processes: their start, their errors, and their end."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.data.prepare.test_prepare import preprocess
from tests.waiting import HANG_S
from trainer.data.commands.preprocess import main
from trainer.data.errors import DataError
from trainer.data.prepare import pipeline, workers
from trainer.data.prepare.chunk_work import ChunkWork
from trainer.data.prepare.chunks import Chunk, Span
from trainer.data.prepare.encoding import Recipe
from trainer.data.prepare.node_status import Terminated, raise_on_sigterm
from trainer.data.prepare.part_file import Footer
from trainer.data.prepare.workers import TokenizerFacts, do_chunks, learn_facts
from trainer.data.tokenizers.settings import TokenizerSettings

WORK = ChunkWork(Path("parts"), Recipe(), "file", False)


FACTS = learn_facts(TokenizerSettings("NullTokenizer", vocab_size=9))


class Scripted:
    """Stub of two processes, each ready only after both were started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.slow: dict[int, Exception] = {}
        """Chunks that are answered late, and their answers."""
        self.quick: dict[int, Exception] = {}
        self._late: list[Callable[[], None]] = []
        self._started: list[Any] = []
        self._beats = 0
        self._kind = workers._Worker
        monkeypatch.setattr(workers, "_Worker", self.start)
        monkeypatch.setattr(workers, "_BEAT_SECONDS", 0.01)

    def start(self, *_: object) -> Any:
        worker = self._kind.__new__(self._kind)
        worker.connection, theirs = Pipe()
        worker.is_ready, worker.chunk = False, None
        number = len(self._started)
        self.events.append(f"start {number}")

        def give(chunk: Chunk) -> None:
            self.events.append(f"give {chunk.number} to {number}")
            worker.chunk = replace(chunk, content=None)
            if chunk.number in self.slow:
                self._late.append(lambda: theirs.send(self.slow[chunk.number]))
            else:
                theirs.send(self.quick.get(chunk.number, (Footer(), False)))

        worker.give, worker.end, worker.wait = give, worker.connection.close, theirs.close  # type: ignore[method-assign]
        self._started.append(theirs)
        if len(self._started) == 2:
            for other in self._started:
                other.send(workers._READY)
        return worker

    def beat(self) -> None:
        self._beats += 1
        assert self._beats < 100, "nothing happens any more"
        if self._beats > 5:
            while self._late:
                self._late.pop()()


def test_all_processes_start_before_any_gets_a_chunk_with_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes sent to an unready process would block the others: a pipe holds kilobytes."""
    script = Scripted(monkeypatch)
    held: list[int] = []

    def compressed() -> Iterator[Chunk]:
        for number in range(5):
            held.append(number - sum(word.startswith("give") for word in script.events))
            yield Chunk(number, (Span("in.gz"),), 1, b"text")

    done = [chunk.number for chunk, _ in do_chunks(compressed(), WORK, FACTS, 2, script.beat)]
    assert sorted(done) == list(range(5))
    assert script.events[:2] == ["start 0", "start 1"]
    # At most one chunk with content is in our memory at a time.
    assert max(held) == 0


def test_the_first_bad_document_is_named_in_any_order_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted(monkeypatch)
    script.slow[0], script.quick[1] = DataError("of the first chunk"), DataError("of the second chunk")
    chunks = [Chunk(number, (Span("in.jsonl"),), 1) for number in range(4)]
    with pytest.raises(DataError, match="of the first chunk"):
        list(do_chunks(iter(chunks), WORK, FACTS, 2, script.beat))
    assert [word for word in script.events if word.startswith("give")] == ["give 0 to 0", "give 1 to 1"]


def test_a_tokenizer_that_changed_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokenizer_file: Path
) -> None:
    """Both in this process, and in a process that is started later."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tokenizer_file.read_bytes())
    (tmp_path / "in.txt").write_text("some text")

    def learn_and_change(settings: TokenizerSettings) -> TokenizerFacts:
        facts = learn_facts(settings)
        content = json.loads(file.read_text())
        content["model"]["merges"].pop()
        file.write_text(json.dumps(content))
        return facts

    monkeypatch.setattr(pipeline, "learn_facts", learn_and_change)
    command = ["--input", str(tmp_path / "in.txt"), "--output-prefix", str(tmp_path / "o")]
    assert main([*command, "--tokenizer-model", str(file)]) == 3
    said = capsys.readouterr().err
    assert f"{file}: the tokenizer was changed while it was in use (its sha256 was " in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "tokenizer.json"]
    chunk = Chunk(0, (Span(str(tmp_path / "in.txt")),), 1)
    with pytest.raises(DataError, match="the tokenizer was changed while it was in use"):
        list(do_chunks(iter([chunk]), WORK, replace(FACTS, sha256="0" * 64), 1, lambda: None))


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_an_interrupt_while_a_process_starts_ends_it(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, error: type[BaseException]
) -> None:
    calls: list[str] = []

    class Started:
        pid = None

        def start(self) -> None:
            self.pid = os.getpid()
            os.kill(os.getpid(), number)

        def __getattr__(self, name: str) -> Callable[[], None]:
            return lambda: calls.append(name)

    context = SimpleNamespace(Pipe=Pipe, Process=lambda **_: Started())
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    with raise_on_sigterm():
        before = signal.getsignal(number)
        with pytest.raises(error):
            workers._Worker(None)
        assert calls == ["kill", "join", "close"]
        assert signal.getsignal(number) is before


def test_worker_processes_import_neither_torch_nor_pydantic() -> None:
    """Every worker process imports the same modules: torch takes a hundred megabytes, pydantic ten."""
    heavy = "{'torch', 'transformers', 'pydantic', 'pyarrow'}"
    code = f"import sys, trainer.data.commands.preprocess; sys.exit(str({heavy} & {{*sys.modules}} or ''))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert found.stderr.strip() == ""


def test_freed_memory_is_returned_and_processes_that_have_grown_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_text("1 2")
    resident = [100 << 20]
    freed: list[int] = []

    def give_back() -> None:
        freed.append(resident[0] >> 20)
        resident[0] -= 10 << 20

    monkeypatch.setattr(workers, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(workers, "return_freed_memory", give_back)
    sizes = iter([100, 100, 120, 300])
    worn: list[bool] = []

    class Scripted:
        """Gives one chunk at a time, and records the answers."""

        def recv(self) -> Chunk:
            size = next(sizes, None)
            if size is None:
                raise EOFError
            resident[0] = size << 20
            return Chunk(0, (Span(str(tmp_path / "in.txt")),), 1)

        def send(self, answer: object) -> None:
            if isinstance(answer, tuple):
                worn.append(answer[1])

    workers._do_chunks(Scripted(), ChunkWork(tmp_path, Recipe(), "file", False), FACTS)  # type: ignore[arg-type]
    # After the first chunk, and after each growth.
    assert freed == [100, 120, 300]
    assert worn == [False, False, False, True]


def opened_for_writing(pipe: Path, is_alive: Callable[[], bool]) -> int:
    """Return a descriptor of ``pipe``, as soon as a process reads it."""
    while True:
        assert is_alive(), "no process reads the pipe any more"
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO
            time.sleep(0.01)
        else:
            os.set_blocking(descriptor, True)
            return descriptor


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_signal_causes_a_traceback(tmp_path: Path, end: signal.Signals) -> None:
    """Ctrl-C and SIGTERM reach every process, SIGKILL only one.

    Ctrl-C goes to all processes of a terminal, a scheduler's SIGTERM to all of a job. SIGKILL ends one process, while
    its worker still reads the tokenizer."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "1 " * 1_000_000}) + "\n")
    file = tmp_path / "tokenizer.json"
    os.mkfifo(file)
    command = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "o")]
    with preprocess(*command, "--tokenizer-model", str(file), start_new_session=True) as process:
        tokenizer = opened_for_writing(file, lambda: process.poll() is None)
        if end is signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, end)
        process.wait()
        with suppress(BrokenPipeError):
            os.write(tokenizer, b"{}")
        os.close(tokenizer)
        said = process.communicate(timeout=HANG_S)[1]
    reasons = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}
    assert said == (f"llmctl data prepare: {reasons[end]}\n" if end in reasons else "")
    assert process.returncode == (128 + end if end in reasons else -end)


def test_sigterm_to_all_processes_keeps_finished_parts(tmp_path: Path) -> None:
    """No process reports a failure, and the same command resumes."""
    line = json.dumps({"text": "1 2 3 " * 100_000}) + "\n"
    (tmp_path / "in.jsonl").write_text(line * 12)
    command = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    prefixes = [str(tmp_path / name / "n") for name in ("whole", "ended")]
    assert main([*command, "--workers", "1", "--output-prefix", prefixes[0]]) == 0
    arguments = [*command, "--workers", "2", "--output-prefix", prefixes[1]]
    with preprocess(*arguments, start_new_session=True) as process:
        while not list((tmp_path / "ended").glob("*/*/*.shard")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGTERM)
        said = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 128 + signal.SIGTERM
    kept = r"(1 part is|\d+ parts are) done and kept: run the same command again to continue"
    # A slow machine has shown its progress before.
    progress = r"(\d[^\n]* left\n)*"
    assert re.fullmatch(rf"{progress}llmctl data prepare: ended by SIGTERM \({kept}\)\n", said), said
    assert not list((tmp_path / "ended").rglob("*.partial"))
    assert main(arguments) == 0
    whole, ended = ({file.name: file.read_bytes() for file in Path(prefix).parent.iterdir()} for prefix in prefixes)
    assert ended == whole
