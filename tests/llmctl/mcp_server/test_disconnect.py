"""The end of the connection during a slow call: the client closes the connection, is killed, or ends the server."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmctl.cli.main import main
from tests.llmctl.mcp_server.served import HELLO, ROOT, words_of
from tests.waiting import HANG_S, children_of, wait_for, wait_for_ends

COMMAND = """#!/bin/bash
# Stand-in for {name}. While the pipe `hold` exists, its answer waits for a line in the pipe.
cd "$NOTES"
if [[ -p hold ]]; then echo $$ >{name}.pid.new; mv {name}.pid.new {name}.pid; read -r _ <>hold; fi
echo '{answer}'
"""
CLIENT = """
import json, subprocess, sys
messages = json.loads(sys.argv[1])
server = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(server.pid, flush=True)
for message in messages:
    server.stdin.write(json.dumps(message).encode() + b"\\n")
    server.stdin.flush()
sys.stdin.readline()
server.stdin.close()
print(server.wait(), flush=True)
"""


@pytest.fixture
def lab(login_node, monkeypatch):
    """The folder of a user of cluster lab, who has the run ``slow``; commands of Slurm wait from now on."""
    (login_node / "bin").mkdir()
    for name, answer in (("sbatch", "7"), ("squeue", "7|RUNNING|N/A||None|slow")):
        path = login_node / "bin" / name
        path.write_text(COMMAND.format(name=name, answer=answer))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{login_node}/bin:/usr/bin:/bin")
    assert main(["submit", "--cluster", "lab", "--name", "slow", "--", "true"]) == 0
    os.mkfifo(login_node / "hold")
    return login_node


def begun(place: Path, tool: str, **arguments: object) -> tuple["subprocess.Popen[bytes]", int]:
    """A client in the midst of a call, and the process id of its server."""
    messages = [
        {"jsonrpc": "2.0", "method": "initialize", "id": 1, "params": HELLO},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "method": "tools/call", "id": 2, "params": {"name": tool, "arguments": arguments}},
    ]
    words = [sys.executable, "-c", CLIENT, json.dumps(messages), *words_of("--allow-submit")]
    with (place / "said").open("wb") as said:
        client = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    return client, int(client.stdout.readline())


def pid_of(place: Path, command: str) -> int:
    path = place / f"{command}.pid"
    wait_for(path.exists, f"the start of {command}")
    return int(path.read_text())


@pytest.mark.parametrize("end", ["close", "kill", "terminate"])
def test_the_server_and_its_commands_end_with_the_client(lab, end):
    client, server = begun(lab, "status", runs=["slow"])
    with client:
        squeue = pid_of(lab, "squeue")
        assert squeue in children_of(server)
        if end == "close":
            assert client.communicate(b"\n", timeout=HANG_S)[0] == b"0\n"
        elif end == "kill":
            client.kill()
        else:
            os.kill(server, signal.SIGTERM)
            assert client.communicate(b"\n", timeout=HANG_S)[0] == b"-15\n"
        # Nobody writes into `hold`: only a signal ends the command.
        wait_for_ends([server, squeue])
    assert (lab / "said").read_text() == ""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_submission_that_has_begun_is_done_first(lab, end):
    client, server = begun(lab, "submit", cluster="lab", command=["true"], name="new")
    with client:
        sbatch = pid_of(lab, "sbatch")
        if end == "kill":
            client.kill()
        else:
            client.stdin.write(b"\n")
            client.stdin.flush()
        assert sbatch in children_of(server)
        (lab / "hold").write_text("go\n")
        wait_for_ends([server, sbatch])
        client.wait(HANG_S)  # it writes the exit code of the server into a pipe that is still open
    (lab / "hold").unlink()
    (run,) = (lab / "runs").glob("new-*")
    (submission,) = json.loads((run / "run.json").read_text())["submissions"]
    assert [job["job_id"] for job in submission["jobs"]] == ["7"]
    assert "Traceback" not in (lab / "said").read_text()
