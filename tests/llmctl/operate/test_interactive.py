"""``llmctl interactive``: exit codes, a shell on a terminal, a run's environment."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.errors import SchedulerError
from llmctl.operate.interactive import Session
from llmctl.runs.index import RunIndex
from llmctl.transport.local import LocalTransport
from llmctl.transport.processes import identify
from tests.llmctl.run_directories import beat, make_run
from tests.waiting import HANG_S

LLMCTL = (sys.executable, "-m", "llmctl.cli.main")


@pytest.fixture
def run(home):
    """A run with one live rank, to attach to."""
    made = make_run(home / "runs", "demo-1", train_iters=10)
    rank = subprocess.Popen(
        ["sleep", "10000"], env={**os.environ, "LLMCTL_RUN_DIR": str(made.path)}, start_new_session=True
    )
    made.submit(identify(rank.pid))
    attempt = made.start_attempt()
    (attempt / "rank-00001.log").write_text("")
    beat(attempt, 1, age_s=1, pid=rank.pid, phase="forward")
    RunIndex(home / "state" / "llmctl").add(made.record)
    yield made
    rank.kill()
    rank.wait(HANG_S)


def output_of(*arguments, code=0):
    done = subprocess.run(
        [*LLMCTL, "interactive", *arguments], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.usefixtures("home")
def test_variables_of_llmctl_do_not_reach_the_job():
    assert "PYDANTIC_DISABLE_PLUGINS" not in output_of("--", "env")


@pytest.mark.usefixtures("home")
def test_a_shell_reads_its_commands_from_a_pipe():
    argv = [*LLMCTL, "interactive"]
    text = "echo in the shell; exit 9\n"
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (9, "in the shell\n", "")


@pytest.mark.usefixtures("home")
def test_a_commands_exit_code_and_signal_are_passed_on():
    assert main(["interactive", "--cluster", "local", "--", "true"]) == 0
    assert main(["interactive", "--", "bash", "-c", "exit 7"]) == 7
    assert main(["interactive", "--", "bash", "-c", "kill -TERM $$"]) == 128 + signal.SIGTERM
    assert main(["interactive", "--", "no-such-command"]) == 127


@pytest.mark.usefixtures("home")
def test_arguments_arrive_as_they_were_typed():
    odd = ["a b", "$(id)", "'", "--", "-x", "", "*"]
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    out = output_of("--", sys.executable, "-c", program, *odd)
    assert out == '["a b", "$(id)", "\'", "--", "-x", "", "*"]\n'


@pytest.mark.usefixtures("home")
def test_a_shell_and_a_command_that_names_it_have_the_trainer_of_jobs():
    text = "echo $PYTHONPATH"
    argv = [*LLMCTL, "interactive"]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert f"/runs/.llmctl-{os.geteuid()}/code/" in done.stdout.rpartition(":")[2]
    assert "Usage: python -m trainer" in output_of("--", "python", "-m", "trainer", "--help")
    assert "/runs/" not in output_of("--", "bash", "-c", "echo $PYTHONPATH")


@pytest.mark.usefixtures("home")
def test_the_environment_of_a_run(run):
    out = output_of("--run", "demo", "--rank", "1", "--", "env")
    variables = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    assert variables["LLMCTL_RUN_ID"] == "demo-1"
    assert variables["LLMCTL_RUN_DIR"] == str(run.path)
    assert variables["LLMCTL_ATTEMPT"] == "1"
    assert variables["LLMCTL_RANK_PID"] == run.record.submissions[-1].jobs[0].job_id
    assert variables["PYTHONPATH"].startswith(f"{run.path}/code:{run.path}/code/user")


@pytest.mark.usefixtures("run")
def test_invalid_requests_are_refused_before_anything_starts(capsys):
    for arguments, code, message in [
        (["--rank", "1"], 2, "give --run RUN too"),
        (["--run", "demo", "--rank", "9"], 5, "there are ranks 1"),
        (["--run", "nothing"], 5, "demo-1"),
        (["--run", "demo", "--cluster", "other"], 2, "demo-1 is on local"),
        (["--cluster", "nowhere"], 2, "no cluster is called 'nowhere'"),
        (["--container", "image"], 2, "--container: local has no scheduler"),
        (["--nodes", "2"], 2, "--nodes"),
    ]:
        assert main(["interactive", *arguments, "--", "touch", "started"]) == code
        assert message in capsys.readouterr().err
    assert not os.path.lexists("started")


PROMPT = "what next? "


class Terminal:
    """A user's terminal in front of llmctl interactive."""

    def __init__(self, *arguments):
        self.pid, self.side = pty.fork()
        if self.pid == 0:
            os.execve(
                sys.executable,
                [*LLMCTL, "interactive", *arguments],
                {**os.environ, "SHELL": "/bin/bash", "TERM": "dumb", "PS1": "$ "},
            )
        self.seen = ""

    def type(self, text):
        self.seen = ""
        os.write(self.side, text.encode())

    def wait_for_prompt(self):
        """Wait until bash reads again: bash may discard earlier input with the interrupted line."""
        self.wait_for(PROMPT)

    def wait_until_in_front(self, name):
        """Wait until the program leads the foreground group. An earlier key press could reach the shell."""
        end = time.monotonic() + HANG_S
        while Path(f"/proc/{os.tcgetpgrp(self.side)}/comm").read_text() != f"{name}\n":
            assert time.monotonic() < end, f"{name} is not in front; seen {self.seen!r}"
            time.sleep(0.01)

    def wait_for(self, text):
        end = time.monotonic() + HANG_S
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} was not shown, but {self.seen!r}"
            if select.select([self.side], [], [], 0.1)[0]:
                self.seen += os.read(self.side, 65536).decode(errors="replace")

    def exit_code(self):
        end = time.monotonic() + HANG_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if select.select([self.side], [], [], 0.05)[0]:
                with suppress(OSError):  # EIO once the other end is closed
                    self.seen += os.read(self.side, 65536).decode(errors="replace")
            assert time.monotonic() < end, f"does not end; showed {self.seen!r}"

    def close(self):
        os.close(self.side)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@pytest.fixture
def terminal(home):
    opened = []

    def open_one(*arguments):
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()
    assert home.exists()


def test_a_shell_has_job_control_and_interrupts_reach_the_command(terminal):
    shell = terminal()
    # The quotes distinguish the terminal's echo from the output.
    shell.type(f"PS1='what''{PROMPT.removeprefix('what')}'\n")
    shell.wait_for_prompt()
    shell.type("echo in[$LLMCTL_INTERACTIVE]side\n")
    shell.wait_for("in[1]side")
    shell.wait_for_prompt()
    shell.type("sleep 10000\n")
    shell.wait_until_in_front("sleep")
    shell.type("\x03")
    shell.wait_for_prompt()
    shell.type("echo after interrupt $?\n")
    shell.wait_for("after interrupt 130")
    shell.wait_for_prompt()
    shell.type("sleep 10001\n")
    shell.wait_until_in_front("sleep")
    shell.type("\x1a")
    shell.wait_for("Stopped")
    shell.wait_for_prompt()
    # Brought to the foreground before its end: a shell does not exit while it considers a job stopped.
    shell.type("fg\n")
    shell.wait_until_in_front("sleep")
    shell.type("\x03")
    shell.wait_for_prompt()
    shell.type("exit 9\n")
    assert shell.exit_code() == 9


def test_an_interrupt_reaches_a_command_with_a_trap(terminal):
    command = terminal(
        "--", "bash", "-c", 'trap \'echo cau""ght; exit 5\' INT; echo rea""dy; while :; do sleep 0.1; done'
    )
    command.wait_for("ready")
    command.type("\x03")
    command.wait_for("caught")
    assert command.exit_code() == 5
    # No shell here: a shell may lose an interrupt between its last two commands.
    killed = terminal("--", sys.executable, "-c", "import time; print('rea' + 'dy', flush=True); time.sleep(10000)")
    killed.wait_for("ready")
    killed.type("\x03")
    assert killed.exit_code() == 130


def test_sigterm_is_passed_on(home):
    process = subprocess.Popen(
        [
            *LLMCTL,
            "interactive",
            "--",
            "bash",
            "-c",
            f"trap 'touch {home}/asked; kill $!; exit 3' TERM; sleep 6000 & echo ready; wait; kill $!",
        ],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(HANG_S) == 3
        assert (home / "asked").exists()
    finally:
        process.kill()
        process.wait(HANG_S)
        process.stdout.close()


def test_a_success_without_a_begun_command_is_refused(tmp_path):
    """srun of Slurm 22.05 exits with 0 when a plugin of the site fails on the node."""
    proof = str(tmp_path / ".begun-1")
    session = Session(LocalTransport({}), ["true"], None, proof=proof)
    with pytest.raises(SchedulerError, match="the node did not begin the command"):
        session.run()
    assert Session(LocalTransport({}), ["false"], None, proof=proof).run() == 1
    begun = Session(LocalTransport({"PATH": "/usr/bin:/bin"}), ["touch", proof], None, proof=proof)
    assert begun.run() == 0
    assert not Path(proof).exists()
