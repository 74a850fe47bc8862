"""Start and end of the agent: login shells, Python, lost connections and lost callers."""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from llmctl.errors import SchedulerError
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.processes import identify
from llmctl.transport.ssh import agent as agent_module
from llmctl.transport.ssh import transport as transport_module
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.program import program, session_command
from tests.llmctl.transport.agents import PipeRoute, agent
from tests.waiting import HANG_S, wait_for

PASSING = SchedulerError("login: nothing listens on port 22", transient=True)
SHELLS = [name for name in ("sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish") if shutil.which(name)]


class Clock:
    """Stands in for the module ``time``: only sleeping takes time."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class PingedChannel:
    """Channel to an agent at work, on a test clock: each wait takes its whole time, and every ping is answered.

    After ``count`` answers ``at_last`` is called.
    """

    def __init__(self, channel, clock, count, at_last):
        self.channel, self.clock, self.at_last = channel, clock, at_last
        self.left, self.is_pinged, self.is_open = count, False, True

    def read(self, timeout_s):
        if self.left and not self.is_pinged:
            self.clock.sleep(timeout_s)
            return None
        data = self.channel.read(HANG_S)
        if self.left:
            self.left, self.is_pinged = self.left - 1, False
            if not self.left:
                self.at_last()
        return data

    def write(self, data):
        self.is_pinged = b"ping" in data
        self.channel.write(data)


def stop(transport, pid):
    """Stop an agent, which answers no more, and make its client give up soon; of a new agent this says nothing."""
    os.kill(pid, signal.SIGSTOP)
    transport._agent.ping_s, transport._agent.silence_s = 0.05, 0.2


def agent_pid(transport):
    return int(transport.run(["sh", "-c", "echo $PPID"], timeout_s=HANG_S).stdout)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_starts_the_agent(shell):
    transport = agent(PipeRoute(shell, "-c", SHELL=shutil.which(shell)))
    assert transport.run(["echo", "a  'b' !c"], timeout_s=HANG_S).stdout == "a  'b' !c\n"
    transport.close()


def test_output_of_the_login_shell_is_skipped():
    banner = 'printf "Welcome\\nto the cluster\\000\\377"; echo note >&2; eval "$0"'
    transport = agent(PipeRoute("sh", "-c", banner))
    assert transport.list_names(["/nonexistent"]) == [[]]
    transport.close()


def test_commands_have_the_environment_of_the_login_shell(tmp_path):
    (tmp_path / ".profile").write_text('echo "Message of the day"\nexport SITE="a b"\nPATH=/site/bin:$PATH\n')
    transport = agent(PipeRoute(HOME=str(tmp_path)))
    result = transport.run(["sh", "-c", 'echo "$SITE"; echo "${PATH%%:*}"; pwd'], timeout_s=HANG_S)
    assert result.stdout == f"a b\n/site/bin\n{tmp_path}\n"
    transport.close()


def test_a_failing_shell_profile_leaves_the_plain_environment(tmp_path):
    (tmp_path / ".profile").write_text("exit 3\n")
    transport = agent(PipeRoute(HOME=str(tmp_path), PLAIN="yes"))
    assert transport.run(["sh", "-c", "echo $PLAIN"], timeout_s=HANG_S).stdout == "yes\n"
    transport.close()


def test_an_account_without_a_shell_is_an_error_that_quotes_its_output():
    with pytest.raises(SchedulerError, match="its output: This account is currently not available") as caught:
        agent(PipeRoute("sh", "-c", "echo This account is currently not available; exit 1")).home()
    assert not caught.value.transient


def test_a_python_that_is_too_old_or_broken_is_skipped(tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\necho 'pyenv: python3: command not found' >&2\nexit 127\n")
    (tmp_path / "python3.13").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for name in ("python3", "python3.13"):
        (tmp_path / name).chmod(0o755)
    transport = agent(PipeRoute(PATH=f"{tmp_path}:/usr/bin:/bin"))
    assert transport.list_names(["/nonexistent"]) == [[]]
    transport.close()


def test_no_python_at_all(tmp_path):
    (tmp_path / "sh").symlink_to("/bin/sh")
    with pytest.raises(SchedulerError, match="login: python3 is missing, or older than 3.7.*login.python"):
        agent(PipeRoute(shutil.which("sh"), "-c", PATH=str(tmp_path))).home()
    with pytest.raises(SchedulerError, match="~/none of login.python is missing"):
        agent(PipeRoute(), python="~/none").home()


def test_login_python_is_used(tmp_path):
    named = tmp_path / "my python"
    named.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    named.chmod(0o755)
    transport = agent(PipeRoute(HOME=str(tmp_path)), python="~/my python")
    transport.home()
    assert (tmp_path / "used").exists()
    transport.close()


def test_the_agent_program_is_valid_for_the_oldest_python():
    import ast

    for name in ("file_reads", "file_writes", "processes", "commands"):
        ast.parse((Path(agent_module.__file__).parents[1] / f"{name}.py").read_text(), feature_version=(3, 7))
    for name in ("frames", "login_environment", "agent_program", "session_program"):
        ast.parse((Path(agent_module.__file__).parent / f"{name}.py").read_text(), feature_version=(3, 7))


def test_a_reading_call_is_repeated_after_a_lost_connection_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(transport_module, "time", Clock())
    route = PipeRoute()
    transport = agent(route)
    (tmp_path / "log").write_bytes(b"abc")
    assert transport.read_parts([FileRead(str(tmp_path / "log"))])[0].data == b"abc"
    route.failures = [PASSING, PASSING]
    os.kill(agent_pid(transport), signal.SIGKILL)
    assert transport.read_parts([FileRead(str(tmp_path / "log"), 1)])[0].data == b"bc"
    assert transport.warnings == ["connection to login lost; reconnecting", "reconnected to login after 3 s"]
    transport.close()


def test_a_connection_lost_during_a_reading_call(tmp_path):
    route = PipeRoute()
    transport = agent(route)
    pid = agent_pid(transport)
    (tmp_path / "log").write_bytes(b"x")
    stop(transport, pid)
    try:
        assert transport.read_parts([FileRead(str(tmp_path / "log"))])[0].data == b"x"
    finally:
        os.kill(pid, signal.SIGKILL)
    assert len(route.opened) == 2
    assert transport.warnings[-1].startswith("reconnected to login after")
    transport.close()


def test_a_call_that_changes_something_is_never_repeated(tmp_path):
    route = PipeRoute()
    transport = agent(route)
    script = f"echo once >>{tmp_path}/count; kill -9 $PPID; sleep 1"
    with pytest.raises(ConnectionLost, match="lost while `sh` ran; the outcome is unknown") as caught:
        transport.run(["sh", "-c", script], timeout_s=HANG_S)
    assert (caught.value.transient, caught.value.exit_status, caught.value.argv[0]) == (True, None, "sh")
    assert (tmp_path / "count").read_text() == "once\n"
    assert len(route.opened) == 1
    # The loss is known before anything is sent, so the next call opens a new connection.
    transport.write_files([FileWrite(str(tmp_path / "file"), b"")])
    assert transport.warnings[-1].startswith("reconnected")
    transport.close()


def test_a_lock_lost_with_its_connection_stops_the_work(tmp_path):
    transport = agent(PipeRoute())
    with (
        pytest.raises(ConnectionLost, match="and with it the lock on the run"),
        transport.lock(str(tmp_path / ".lock")),
    ):
        os.kill(agent_pid(transport), signal.SIGKILL)
        wait_for(lambda: not transport._agent.is_open, "the agent's end")
        assert transport.list_names([str(tmp_path)]) == [[".lock"]]
        transport.write_files([FileWrite(str(tmp_path / "file"), b"")])
    transport.write_files([FileWrite(str(tmp_path / "file"), b"")])
    with transport.lock(str(tmp_path / ".lock")):
        pass
    transport.close()


def test_a_silent_agent_counts_as_lost():
    transport = agent(PipeRoute())
    pid = agent_pid(transport)
    stop(transport, pid)
    try:
        with pytest.raises(ConnectionLost, match="connection lost while `true` ran"):
            transport.run(["true"], timeout_s=HANG_S)
    finally:
        os.kill(pid, signal.SIGKILL)
        transport.close()


def test_an_agent_with_a_long_command_is_not_lost(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(agent_module, "time", clock)
    transport = agent(PipeRoute())
    transport.home()
    began = clock.now
    own, go = transport._agent._channel, tmp_path / "go"
    transport._agent._channel = PingedChannel(own, clock, 12, go.touch)
    done = transport.run(["sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done"], timeout_s=HANG_S)
    transport._agent._channel = own
    assert done.exit_status == 0
    assert clock.now - began > 2 * transport._agent.silence_s
    transport.close()


def test_the_agent_and_its_command_end_with_the_caller(tmp_path):
    route = PipeRoute()
    transport = agent(route)
    pid = agent_pid(transport)
    transport._agent._send(
        {
            "number": 99,
            "act": "run",
            "args": [["sh", "-c", f"echo $$ >{tmp_path}/pid; sleep 1000"], 1000, None, {}, b""],
            "options": {},
        }
    )
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the command")
    # As when a caller dies. close() would kill an agent that has not ended within a second.
    transport._agent._channel._process.stdin.close()
    wait_for(lambda: identify(pid) is None, "the agent's end")
    wait_for(lambda: identify(int((tmp_path / "pid").read_text())) is None, "the command's end")
    transport.close()


def test_transient_failures_are_retried_within_bounds(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(transport_module, "time", clock)
    transport = agent(PipeRoute(failures=[PASSING] * 3))
    assert transport.list_names(["/nonexistent"]) == [[]]
    transport.close()
    began, route = clock.now, PipeRoute(failures=[PASSING] * 9)
    with pytest.raises(SchedulerError, match="nothing listens"):
        agent(route).home()
    assert (clock.now - began, len(route.failures)) == (7.0, 5), "a fourth pause of 8 s would be too long"
    with pytest.raises(SchedulerError, match="key has changed"):
        agent(PipeRoute(failures=[SchedulerError("key has changed", transient=False)])).home()


def test_the_call_after_an_interrupted_one_gets_its_own_answer(tmp_path):
    transport = agent(PipeRoute())
    begun, go, caller = tmp_path / "begun", tmp_path / "go", threading.get_ident()

    def interrupt():
        wait_for(begun.exists, "the command")
        signal.pthread_kill(caller, signal.SIGINT)

    user = threading.Thread(target=interrupt)
    user.start()
    with pytest.raises(KeyboardInterrupt):
        transport.run(["sh", "-c", f"touch {begun}; until [ -e {go} ]; do sleep 0.05; done"], timeout_s=HANG_S)
    user.join()
    go.touch()
    assert transport.run(["echo", "mine"], timeout_s=HANG_S).stdout == "mine\n"
    transport.close()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_on_the_terminal_runs_below_any_shell(shell, tmp_path):
    words = ["a b", "'\"", "!x", "\\", "$(id)", "line\nbreak", os.fsdecode(b"\xff")]
    script = (
        "import os, sys; open('out', 'wb').write(b'|'.join(map(os.fsencode, sys.argv[1:]))); os.kill(os.getpid(), 15)"
    )
    line = session_command(sys.executable, [sys.executable, "-c", script, *words], str(tmp_path))
    status = os.spawnvpe(os.P_WAIT, shell, [shell, "-c", line], {**os.environ, "SHELL": "/bin/sh"})
    assert status == 128 + signal.SIGTERM
    assert (tmp_path / "out").read_bytes() == b"|".join(map(os.fsencode, words))


def test_an_agent_program_is_complete():
    assert b"def archive_for" in program("llmctl.transport.ssh.agent_program", "mark")
