"""Escape sequences in a job's files, as llmctl shows them on a real terminal."""

import json
import os
import pty
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmctl.cli import doctor
from llmctl.cli.main import main
from llmctl.doctor.python import Check
from llmctl.runs.index import RunIndex
from llmctl.runs.logs import LogFollower
from llmctl.transport.processes import identify
from llmctl.transport.ssh.terminal import Terminal
from tests.llmctl.follower import Follower
from tests.llmctl.run_directories import TRANSPORT, MadeRun, fail, leave, make_run
from tests.llmctl.scripted_cluster import ScriptedCluster
from tests.waiting import HANG_S

HOSTILE = (
    "\x1b]0;TITLE\x07\x1b]52;c;Q0xJUA==\x07\x1b]8;;http://LINK\x1b\\\x1bPDCS\x1b\\\x9d52;c;Q0xJUA==\x9c\x9b7;7H"
    "\x1b[2J\x1b[3J\x1b[7;7H\x1b[45;5m"
)
"""Title, clipboard, link, control string, both in one byte, erasing, cursor, colour."""
HARM = ("TITLE", "Q0xJUA", "LINK", "DCS", "\x9b", "\x9d", "\x1b[2J", "\x1b[3J", "7;7H", "45;5m")


@pytest.fixture
def run(own_folders: Path) -> Iterator[MadeRun]:
    """A running run, whose attempt has two ranks with hostile logs."""
    job = subprocess.Popen(["sleep", "10000"], start_new_session=True)
    made = make_run(own_folders / "runs", "demo-1").submit(identify(job.pid))
    RunIndex(own_folders / "state" / "llmctl").add(made.record)
    attempt = made.start_attempt()
    for rank in (0, 1):
        (attempt / f"rank-{rank:05d}.log").write_text(f"{HOSTILE}words of rank {rank}\n")
    (made.path / "job.log").write_text(f"{HOSTILE}words of job.sh\n")
    yield made
    job.kill()
    job.wait(HANG_S)


def on_a_terminal(*arguments: str) -> str:
    """All that llmctl writes to its terminal."""
    process = Follower(*arguments, terminal=True)
    try:
        process.end()
    finally:
        process.close()
    return process.seen


def harm_in(text: str) -> list[str]:
    return [mark for mark in HARM if mark in text]


def failed(run: MadeRun) -> Path:
    attempt = run.path / "attempts/1"
    fail(attempt, 1, f"{HOSTILE}loss is NaN", age_s=5, kind="ValueError", host=f"n1{HOSTILE}")
    path = attempt / "errors/rank-00001.json"
    trace = f"Traceback\n{HOSTILE}ValueError: elsewhere"
    path.write_text(json.dumps({**json.loads(path.read_text()), "traceback": trace}))
    leave(attempt, "failed", 1)
    return attempt


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["logs", "demo-1"], ["words of rank 0"]),
        (["logs", "demo-1", "--rank", "all"], ["words of rank 0", "words of rank 1"]),
        (["logs", "demo-1", "--job"], ["words of job.sh"]),
        (["logs", "demo-1", "--rank", "failed"], ["words of rank 1", "loss is NaN", "ValueError: elsewhere"]),
        (["logs", "-f", "demo-1"], ["words of rank 0", "loss is NaN"]),
        (["status", "demo-1"], ["loss is NaN"]),
        (["cancel", "demo-1"], ["failed"]),
        (["--debug", "logs", "-f", "demo-1"], ["loss is NaN", "Traceback (most"]),
    ],
    ids=lambda value: ascii(" ".join(value))[:30],
)
def test_words_of_a_job_do_nothing_to_the_terminal(run: MadeRun, arguments: list[str], words: list[str]) -> None:
    failed(run)
    seen = on_a_terminal(*arguments)
    assert [word for word in words if word not in seen] == [], ascii(seen)
    assert harm_in(seen) == [], ascii(seen)


def test_words_of_a_job_that_come_while_it_is_followed(run: MadeRun) -> None:
    attempt = run.path / "attempts/1"
    follower = Follower("logs", "-f", "demo-1", "--rank", "all", terminal=True)
    try:
        follower.wait_for("words of rank 1")
        for cut in range(1, len(HOSTILE.encode())):
            with (attempt / "rank-00000.log").open("ab") as log:
                log.write(HOSTILE.encode()[:cut])
                log.flush()
                log.write(HOSTILE.encode()[cut:] + b"after cut %d\n" % cut)
        follower.wait_for(f"after cut {cut}")
        failed(run)
        follower.end()
    finally:
        follower.close()
    assert "loss is NaN" in follower.seen
    assert harm_in(follower.seen) == [], ascii(follower.seen)


def test_a_sequence_that_comes_in_two_reads_is_removed_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for cut in range(1, len(HOSTILE.encode())):
        path.write_bytes(HOSTILE.encode()[:cut])
        follower = LogFollower(TRANSPORT.read_parts)
        follower.follow({"rank 0": str(path)}, {})
        assert follower.poll() == []
        with path.open("ab") as log:
            log.write(HOSTILE.encode()[cut:] + b"end\n")
        assert [line.text for line in follower.poll()] == ["end"], cut


def test_findings_of_the_doctor_do_nothing_to_the_terminal(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Check("torch", "warning", f"{HOSTILE}no torch", f"{HOSTILE}install torch")
    monkeypatch.setattr(doctor, "examine", lambda *_: [fault])
    assert main(["doctor", "--cluster", cluster.name]) == 0
    seen = capsys.readouterr().out
    assert "no torch" in seen and "install torch" in seen
    assert harm_in(seen) == []


def test_the_question_of_a_host_does_nothing_to_the_terminal() -> None:
    ours, theirs = pty.openpty()
    answers: list[str] = []
    terminal = Terminal(os.ttyname(theirs))
    asking = threading.Thread(target=lambda: answers.append(terminal.ask(f"{HOSTILE}Code: ")), daemon=True)
    try:
        asking.start()
        seen = ""
        while "Code: " not in seen:
            seen += os.read(ours, 65536).decode()
        os.write(ours, b"answer\n")
        while "\n" not in seen:  # the echo of the answer is off, the end of the line is printed
            seen += os.read(ours, 65536).decode()
        asking.join(HANG_S)
    finally:
        os.close(theirs)
        os.close(ours)
    assert answers == ["answer"]
    assert harm_in(seen) == []


def test_words_of_a_scheduler_do_nothing_to_the_terminal(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.backend.says("nodes", f"n1|down|{HOSTILE}fan broken|8|0|gpu{HOSTILE}")
    assert main(["nodes", "--cluster", "scripted"]) == 0
    seen = capsys.readouterr().out
    assert "fan broken" in seen and "gpu" in seen
    assert harm_in(seen) == []
    cluster.run("demo-1")
    cluster.backend.says("queue", f"17|PENDING|job-demo-1|{HOSTILE}Priority|||")
    assert main(["status", "demo-1"]) == 0
    seen = capsys.readouterr().out
    assert "Priority" in seen
    assert harm_in(seen) == []
    cluster.backend.fails("nodes", f"{HOSTILE}slurmctld is away")
    assert main(["nodes", "--cluster", "scripted"]) == 4
    seen = capsys.readouterr().err
    assert "slurmctld is away" in seen
    assert harm_in(seen) == []
