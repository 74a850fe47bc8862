"""Notices of a job with real processes: to a web server of the test, to commands and to a stand-in for sendmail."""

import http.server
import json
import signal
import threading

import pytest

from llmctl.supervisor import notices as notices_module
from llmctl.supervisor.attempt import Attempt
from llmctl.supervisor.notices import Notices
from tests.llmctl.supervisor.test_supervisor import SUCCESS, ending, run_job, settings, start
from tests.waiting import HANG_S, wait_for

ALL = ["begin", "end", "fail", "hang", "restart"]
FAILURE = 'touch "$LLMCTL_HOSTFILE"; exit 3\n'


class Server:
    """A web server that keeps what is posted; its answer is ``status``."""

    def __init__(self, status=200):
        self.posted, self.status = [], status
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.posted.append((self.path, json.loads(body)))
                self.send_response(server.status)
                self.end_headers()

            def log_message(self, *words):
                del words

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/hook-of-the-test"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def teller(tmp_path):
    """A command that notes what it is told, and the file of its notes."""
    told, script = tmp_path / "told", tmp_path / "teller"
    script.write_text(f'#!/bin/sh\necho "$LLMCTL_EVENT: $LLMCTL_NOTICE" >>{told}\nexec cat >>{told}.json\n')
    script.chmod(0o755)
    return f"command:{script}", told


def test_begin_failure_and_restart_are_told_to_every_place(tmp_path, teller):
    command, told = teller
    with Server() as server:
        job = run_job(tmp_path / "run", FAILURE, notify=[command, server.address], notify_on=ALL)
        assert job.wait(HANG_S) == 3
        job = start(tmp_path / "run")
        assert job.wait(HANG_S) == 3
    expected = [
        "begin: r started (job 7)",
        "fail: r failed with exit code 3",
        "restart: r started again, as attempt 2 (job 7)",
        "fail: r failed with exit code 3",
    ]
    # Each notice is a process of its own: two of them may be written in either order.
    assert sorted(told.read_text().splitlines()) == sorted(expected)
    posted = [notice for path, notice in server.posted if path == "/hook-of-the-test"]
    assert sorted(f"{notice['event']}: {notice['text']}" for notice in posted) == sorted(expected)
    assert all(notice["content"] == notice["text"] and notice["run_id"] == "r" for notice in posted)


def test_an_end_is_told_and_other_events_are_not(tmp_path, teller):
    command, told = teller
    job = run_job(tmp_path / "run", f'touch "$LLMCTL_HOSTFILE"; {SUCCESS}', notify=[command], notify_on=["end", "fail"])
    assert job.wait(HANG_S) == 0
    assert told.read_text() == "end: r completed\n"
    assert json.loads((tmp_path / "told.json").read_text())["attempt"] == 1


def test_an_end_by_a_signal_is_told(tmp_path, teller):
    command, told = teller
    script = f'touch "$LLMCTL_HOSTFILE" {tmp_path}/launched; sleep {HANG_S}\n'
    job = run_job(tmp_path / "run", script, notify=[command], notify_on=ALL)
    wait_for((tmp_path / "launched").exists, "the launch")
    job.send_signal(signal.SIGTERM)
    job.wait(HANG_S)
    assert ending(tmp_path / "run")["reason"] == "stopped"
    assert "end: r stopped" in told.read_text().splitlines()


def test_a_place_that_fails_or_hangs_never_touches_the_run(tmp_path, teller):
    command, told = teller
    places = ["command:/nonexistent/program", "command:false", "http://127.0.0.1:1/x", "mailto:me@lab", command]
    with Server(status=500) as server:
        job = run_job(tmp_path / "run", FAILURE, notify=[*places, server.address], notify_on=["fail"])
        said = job.communicate(timeout=HANG_S)[1]
    assert job.returncode == 3 and ending(tmp_path / "run")["cause"] == ""
    assert "fail: r failed" in told.read_text()
    for words in (
        "the notice to command was not sent: /nonexistent/program cannot be started: No such file or directory",
        "the notice to command was not sent: false ended with exit code 1",
        "the notice to http was not sent: the server cannot be reached",
        "the notice to http was not sent: the server answered 500",
    ):
        assert words in said, said


def test_a_notice_that_hangs_is_given_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notices_module, "SEND_S", 1.0)
    job = settings(tmp_path, notify=(f"command:sleep {HANG_S}",), notify_on=("end",))
    (tmp_path / "attempts/1").mkdir(parents=True)
    Notices(job, Attempt(1, str(tmp_path / "attempts/1")), {}, {"PATH": "/usr/bin:/bin"}).end(0, "completed", "")
    assert "a notice took more than 1 s and was given up" in capsys.readouterr().err


def test_an_address_in_a_secret_reaches_no_log_and_no_process_list(tmp_path):
    with Server(status=404) as server:
        secret = tmp_path / "secret"
        secret.write_bytes(b"HOOK\0" + server.address.encode() + b"\0")
        script = f'touch "$LLMCTL_HOSTFILE"; tr "\\0" " " </proc/*/cmdline >{tmp_path}/list 2>/dev/null; exit 3\n'
        places = {"notify": ["secret:HOOK"], "notify_on": ALL, "secrets_file": str(secret)}
        job = run_job(tmp_path / "run", script, **places)
        said = job.communicate(timeout=HANG_S)[1]
    assert [notice["event"] for _, notice in server.posted].count("fail") == 1
    assert "the notice to secret:HOOK was not sent: the server answered 404" in said and "hook-of" not in said
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"hook-of-the-test" not in path.read_bytes(), path
    assert not secret.exists()


def test_an_invalid_address_in_a_secret_is_not_quoted(tmp_path):
    for value in (b"nonsense hook-of-the-test", b"ftp://hook-of-the-test/", b"http://hook-of-the-test:x/"):
        secret = tmp_path / "secret"
        secret.write_bytes(b"HOOK\0" + value + b"\0")
        run = tmp_path / value.hex()
        job = run_job(run, FAILURE, notify=["secret:HOOK"], notify_on=["fail"], secrets_file=str(secret))
        said = job.communicate(timeout=HANG_S)[1]
        assert "the notice to secret:HOOK was not sent: " in said and "hook-of" not in said, said


def test_mail_goes_through_sendmail(tmp_path, monkeypatch):
    """A stand-in for sendmail: a real one would deliver."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sendmail").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words\ncat >{tmp_path}/mail\n')
    (folder / "sendmail").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    job = run_job(tmp_path / "run", FAILURE, notify=["mailto:me@lab.org"], notify_on=["fail"])
    assert job.wait(HANG_S) == 3
    assert (tmp_path / "words").read_text() == "-t -i\n"
    head, _, body = (tmp_path / "mail").read_text().partition("\n\n")
    assert head.splitlines()[:2] == ["To: me@lab.org", "Subject: llmctl: r failed with exit code 3"]
    assert body.startswith("r failed with exit code 3\n") and str(tmp_path / "run") in body


def test_a_hang_is_told_where_it_is_asked_for(tmp_path, teller):
    command, told = teller
    for events in (("hang",), ("end",)):
        job = settings(tmp_path, is_training=True, notify=(command,), notify_on=events)
        notices = Notices(job, Attempt(1, str(tmp_path)), {}, {"PATH": "/usr/bin:/bin"})
        notices.poll()
        notices.poll("hangs: rank 1 waits")
        wait_for(lambda made=notices: all(child.poll() is not None for child, _ in made._running), "the sender")
    assert told.read_text() == "hang: r hangs: rank 1 waits\n"


def test_without_places_nothing_is_started(tmp_path):
    job = run_job(tmp_path / "run", FAILURE, notify=[], notify_on=ALL)
    assert job.communicate(timeout=HANG_S)[1] == "" and job.returncode == 3
