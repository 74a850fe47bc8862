"""Start and end of the agent: login shells of all kinds, no Python, a lost connection, a lost caller."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from llmctl.errors import SchedulerError
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.processes import identify
from llmctl.transport.ssh import agent as agent_module
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.program import program, session_command
from tests.llmctl.transport.agents import PipeRoute, agent

SHELLS = [name for name in ("sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish") if shutil.which(name)]


def wait_for(condition, patience_s=10.0):
    end = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def agent_pid(transport):
    return int(transport.run(["sh", "-c", "echo $PPID"], timeout_s=10).stdout)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_starts_the_agent(shell):
    transport = agent(PipeRoute(shell, "-c", SHELL=shutil.which(shell)))
    assert transport.run(["echo", "a  'b' !c"], timeout_s=10).stdout == "a  'b' !c\n"
    transport.close()


def test_what_a_login_shell_prints_first_is_passed_over():
    banner = 'printf "Welcome\\nto the cluster\\000\\377"; echo note >&2; eval "$0"'
    transport = agent(PipeRoute("sh", "-c", banner))
    assert transport.list_names(["/nonexistent"]) == [[]]
    transport.close()


def test_commands_have_what_the_login_shell_sets_up(tmp_path):
    (tmp_path / ".profile").write_text('echo "Message of the day"\nexport SITE="a b"\nPATH=/site/bin:$PATH\n')
    transport = agent(PipeRoute(HOME=str(tmp_path)))
    said = transport.run(["sh", "-c", 'echo "$SITE"; echo "${PATH%%:*}"; pwd'], timeout_s=10)
    assert said.stdout == f"a b\n/site/bin\n{tmp_path}\n"
    transport.close()


def test_a_profile_that_breaks_leaves_the_plain_environment(tmp_path):
    (tmp_path / ".profile").write_text("exit 3\n")
    transport = agent(PipeRoute(HOME=str(tmp_path), PLAIN="yes"))
    assert transport.run(["sh", "-c", "echo $PLAIN"], timeout_s=10).stdout == "yes\n"
    transport.close()


def test_an_account_without_a_shell_is_told_with_its_own_words():
    with pytest.raises(SchedulerError, match="its output: This account is currently not available") as caught:
        agent(PipeRoute("sh", "-c", "echo This account is currently not available; exit 1")).home()
    assert not caught.value.transient


def test_a_python_that_is_too_old_or_broken_is_passed_over(tmp_path):
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


def test_the_python_that_is_named_is_used(tmp_path):
    named = tmp_path / "my python"
    named.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    named.chmod(0o755)
    transport = agent(PipeRoute(HOME=str(tmp_path)), python="~/my python")
    transport.home()
    assert (tmp_path / "used").exists()
    transport.close()


def test_the_program_holds_on_the_oldest_python():
    import ast

    for name in ("file_reads", "file_writes", "processes", "commands"):
        ast.parse((Path(agent_module.__file__).parents[1] / f"{name}.py").read_text(), feature_version=(3, 7))
    for name in ("frames", "login_environment", "agent_program", "session_program"):
        ast.parse((Path(agent_module.__file__).parent / f"{name}.py").read_text(), feature_version=(3, 7))


def test_a_call_that_looks_is_repeated_after_a_lost_connection_and_says_so(tmp_path):
    route = PipeRoute()
    transport = agent(route)
    (tmp_path / "log").write_bytes(b"abc")
    assert transport.read_parts([FileRead(str(tmp_path / "log"))])[0].data == b"abc"
    os.kill(agent_pid(transport), signal.SIGKILL)
    assert transport.read_parts([FileRead(str(tmp_path / "log"), 1)])[0].data == b"bc"
    assert transport.warnings == ["connection to login lost; reconnecting", "reconnected to login after 0 s"]
    transport.close()


def test_a_connection_lost_in_the_middle_of_looking(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module, "SILENCE_S", 0.6)
    monkeypatch.setattr(agent_module, "PING_S", 0.2)
    route = PipeRoute()
    transport = agent(route)
    pid = agent_pid(transport)
    (tmp_path / "log").write_bytes(b"x")
    os.kill(pid, signal.SIGSTOP)
    try:
        assert transport.read_parts([FileRead(str(tmp_path / "log"))])[0].data == b"x"
    finally:
        os.kill(pid, signal.SIGKILL)
    assert len(route.opened) == 2
    assert transport.warnings[-1].startswith("reconnected to login after")
    transport.close()


def test_what_changes_something_is_never_repeated(tmp_path):
    route = PipeRoute()
    transport = agent(route)
    script = f"echo once >>{tmp_path}/count; kill -9 $PPID; sleep 1"
    with pytest.raises(ConnectionLost, match="lost while `sh` ran; the outcome is unknown") as caught:
        transport.run(["sh", "-c", script], timeout_s=10)
    assert (caught.value.transient, caught.value.exit_status, caught.value.argv[0]) == (True, None, "sh")
    assert (tmp_path / "count").read_text() == "once\n"
    assert len(route.opened) == 1
    # The loss is known before anything is sent, so the next call opens a new connection.
    transport.write_files([FileWrite(str(tmp_path / "file"), b"")])
    assert transport.warnings[-1].startswith("reconnected")
    transport.close()


def test_a_lock_that_went_with_its_connection_stops_the_work_under_it(tmp_path):
    transport = agent(PipeRoute())
    with (
        pytest.raises(ConnectionLost, match="and with it the lock on the run"),
        transport.lock(str(tmp_path / ".lock")),
    ):
        os.kill(agent_pid(transport), signal.SIGKILL)
        wait_for(lambda: not transport._agent.is_open)
        assert transport.list_names([str(tmp_path)]) == [[".lock"]]
        transport.write_files([FileWrite(str(tmp_path / "file"), b"")])
    transport.write_files([FileWrite(str(tmp_path / "file"), b"")])
    with transport.lock(str(tmp_path / ".lock")):
        pass
    transport.close()


def test_a_silent_agent_counts_as_lost(monkeypatch):
    monkeypatch.setattr(agent_module, "SILENCE_S", 0.6)
    monkeypatch.setattr(agent_module, "PING_S", 0.2)
    transport = agent(PipeRoute())
    pid = agent_pid(transport)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ConnectionLost, match="connection lost while `true` ran"):
            transport.run(["true"], timeout_s=30)
    finally:
        os.kill(pid, signal.SIGKILL)
        transport.close()


def test_an_agent_at_work_for_long_is_not_lost(monkeypatch):
    monkeypatch.setattr(agent_module, "SILENCE_S", 0.6)
    monkeypatch.setattr(agent_module, "PING_S", 0.2)
    transport = agent(PipeRoute())
    assert transport.run(["sleep", "1.5"], timeout_s=30).exit_status == 0
    transport.close()


def test_the_agent_and_its_command_end_with_the_caller(tmp_path):
    route = PipeRoute()
    transport = agent(route)
    pid = agent_pid(transport)
    transport._agent._send(
        {
            "number": 99,
            "act": "run",
            "args": [["sh", "-c", f"echo $$ >{tmp_path}/pid; sleep 60"], 60, None, {}, b""],
            "options": {},
        }
    )
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    transport.close()
    wait_for(lambda: identify(pid) is None)
    wait_for(lambda: identify(int((tmp_path / "pid").read_text())) is None)


def test_failures_that_may_pass_are_tried_again_within_bounds():
    passing = SchedulerError("login: nothing listens on port 22", transient=True)
    transport = agent(PipeRoute(failures=[passing]))
    assert transport.list_names(["/nonexistent"]) == [[]]
    transport.close()
    with pytest.raises(SchedulerError, match="nothing listens"):
        agent(PipeRoute(failures=[passing] * 9), first_patience_s=0.5).home()
    with pytest.raises(SchedulerError, match="key has changed"):
        agent(PipeRoute(failures=[SchedulerError("key has changed", transient=False)])).home()


def test_an_interrupted_call_leaves_the_next_one_its_own_answer():
    transport = agent(PipeRoute())
    transport.home()
    with pytest.raises(KeyboardInterrupt):
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            transport.run(["sleep", "1"], timeout_s=30)
        finally:
            signal.signal(signal.SIGALRM, before)
    assert transport.run(["echo", "mine"], timeout_s=10).stdout == "mine\n"
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


def test_a_program_is_complete():
    assert b"def archive_for" in program("llmctl.transport.ssh.agent_program", "mark")
