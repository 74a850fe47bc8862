"""Exit of ``llmctl`` with unusable output, arguments or working directory."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from llmctl.cli.console import json_text
from llmctl.cli.main import main
from llmctl.runs.index import RunIndex
from llmctl.site import profile
from llmctl.transport.processes import identify
from tests.llmctl.run_directories import leave, make_run, recycled
from tests.waiting import HANG_S

LLMCTL = (sys.executable, "-m", "llmctl.cli.main")
LONG = "".join(f"line {number}\n" for number in range(30_000))


@pytest.fixture
def run(home):
    """An ended run with more output than a pipe holds."""
    made = make_run(home / "runs", "demo-1", train_iters=None).submit(recycled(identify(1)))
    attempt = made.start_attempt()
    (attempt / "node-00000.log").write_text(LONG)
    RunIndex(home / "state" / "llmctl").add(made.record)
    return made


def shell(line: str) -> subprocess.CompletedProcess:
    """Run ``line`` in bash, with $0 $@ as llmctl."""
    return subprocess.run(
        ["bash", "-c", line, *LLMCTL], capture_output=True, encoding="utf-8", timeout=HANG_S, check=False
    )


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("arguments", ["logs demo -n 30000", "status", "status --json", "--help"])
def test_a_pipe_that_closes_early_is_no_error(arguments):
    done = shell(f'"$0" "$@" {arguments} | head -c 5; echo "${{PIPESTATUS[0]}}"')
    assert (done.stdout[5:], done.stderr) == ("0\n", "")


def test_following_ends_as_interrupted_when_the_pipe_closes(run):
    identity = identify(1)
    run.submit(identity)
    run.start_attempt(2)
    (run.path / "attempts/2/node-00000.log").write_text(LONG)
    with (run.path / "attempts/2/node-00000.log").open("a") as log:
        process = subprocess.Popen(
            ["bash", "-c", '"$0" "$@" logs demo -f -n 1 | head -n 1; echo "${PIPESTATUS[0]}"', *LLMCTL],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "line 29999\n"
        log.write("one more\n")
        log.flush()
        assert process.communicate(timeout=HANG_S) == ("130\n", "")


def test_a_number_that_is_not_finite_is_null():
    document = {"a": math.nan, "b": [{"c": math.inf}, (-math.inf, 1.5)], "d": "NaN"}
    assert json.loads(json_text(document)) == {"a": None, "b": [{"c": None}, [None, 1.5]], "d": "NaN"}


@pytest.mark.usefixtures("run")
def test_a_full_disk_is_an_error():
    done = shell('"$0" "$@" status >/dev/full')
    assert (done.returncode, done.stderr) == (1, "llmctl: cannot write to standard output: No space left on device\n")


def test_closed_streams_are_no_error(run):
    leave(run.path / "attempts/1", "completed")
    assert shell('"$0" "$@" status demo >&-').returncode == 0
    assert shell('"$0" "$@" status nobody >&- 2>&-').returncode == 5


@pytest.mark.usefixtures("run")
def test_bytes_that_are_not_utf_8():
    done = shell(r'"$0" "$@" submit --env "X=$(printf "\377")" -- true')
    assert done.returncode == 2
    assert "is not UTF-8" in done.stderr
    line = r'"$0" "$@" submit --show-script -- printf "$(printf "\377")" | LC_ALL=C grep -c -a -P "\xff"'
    assert shell(line).stdout == "1\n"
    # A character outside the output encoding does not end a command.
    assert shell('PYTHONIOENCODING=latin-1 "$0" "$@" submit --show-script -- echo 漢 | grep "^set -- echo"').stdout


@pytest.mark.usefixtures("run")
def test_a_folder_without_read_permission(monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "/secret/clusters")

    monkeypatch.setattr(profile, "profile_files", refuse)
    assert main(["submit", "--", "true"]) == 3
    assert capsys.readouterr().err == "llmctl: /secret/clusters: Permission denied\n"


@pytest.mark.usefixtures("run")
def test_a_removed_working_directory(tmp_path):
    done = shell(f'mkdir "{tmp_path}/gone" && cd "{tmp_path}/gone" && rmdir "{tmp_path}/gone" && "$0" "$@" status')
    assert "working directory" in done.stderr
    assert done.returncode == 2
    assert not Path(tmp_path / "gone").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "x" * 5000, "--show-script"),
        ("submit", "--cluster", "x" * 5000, "--show-script"),
        ("submit", "--set", f"training.train_iters={'9' * 5000}", "--show-script"),
        ("submit", "--set", "training.train_iters=&x [*x]", "--show-script"),
        ("submit", "--set", f"model={'[' * 3000}{']' * 3000}", "--show-script"),
    ],
    ids=["config", "cluster", "digits", "alias", "brackets"],
)
def test_absurd_values_are_refused_in_one_sentence(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = main(arguments, {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "LLMCTL_RUNS_ROOT": str(tmp_path / "runs")})
    said = capsys.readouterr().err
    assert code in (2, 3) and "internal error" not in said and "Traceback" not in said
