"""Causes of COMMANDs that fail on this machine: what `status` says of the output, and whether they begin again."""

import json

import pytest

from llmctl.cli.main import main
from llmctl.runs.failures.remedies import REMEDIES
from llmctl.supervisor.causes.messages import KINDS

FAILURES = {
    "import": ["python3", "-c", "import nothing_there"],
    "host_memory": ["python3", "-c", "bytearray(10**16)"],
    "no_program": ["bash", "-c", "nothing-there"],
    "exception": ["python3", "-c", "{}['lr']"],
}


def test_every_kind_has_a_remedy():
    assert set(REMEDIES) == set(KINDS)


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.usefixtures("home")
def test_status_says_what_the_output_tells_and_what_helps(kind, capsys):
    assert main(["submit", "--follow", "--run-id", "cmd", "--", *FAILURES[kind]]) == 6
    capsys.readouterr()
    assert main(["status", "cmd"]) == 0
    shown = capsys.readouterr().out
    remedy = REMEDIES[kind]
    assert remedy.title in shown and remedy.advice.replace("RUN", "cmd") in shown


@pytest.mark.usefixtures("home")
def test_a_silent_command_gets_no_cause(capsys):
    assert main(["submit", "--follow", "--run-id", "cmd", "--", "bash", "-c", "exit 3"]) == 6
    capsys.readouterr()
    assert main(["status", "cmd"]) == 0
    assert "ended with exit code 3" in capsys.readouterr().out


def test_a_mistake_does_not_begin_again_and_lost_communication_does(home):
    words = "import sys; sys.exit('RuntimeError: Connection reset by peer')"
    cases = {"usage": (["bash", "-c", "nothing-there"], 1), "peers": (["python3", "-c", words], 2)}
    for run_id, (argv, attempts) in cases.items():
        options = ["--max-restarts", "1", "--restart-on", "lost_peer", "--run-id", run_id]
        assert main(["submit", "--follow", *options, "--", *argv]) == 6
        folder = home / "runs" / run_id / "attempts"
        assert sorted(path.name for path in folder.iterdir() if path.name.isdigit()) == ["1", "2"][:attempts]
        ending = json.loads((folder / str(attempts) / "exit.json").read_text())
        assert ending["class"] == ("config" if run_id == "usage" else "lost_peer")
