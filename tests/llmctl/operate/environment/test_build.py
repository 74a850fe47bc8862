"""``llmctl env build`` on this machine: steps, record, resumption, failures. Wheels are made on the spot."""

import json
import subprocess
import sys

import pytest

from llmctl.cli.main import main
from tests.llmctl.operate.environment.made_wheels import without_own_pip_settings, write_llmctl, write_torch

AWKWARD = "an env's $(folder)"


@pytest.fixture
def links(home, monkeypatch):
    """Folder of wheels of torch, of a name that a shell would change; llmctl's is missing."""
    without_own_pip_settings(monkeypatch)
    folder = home / "wheels $HOME"
    write_torch(folder, "2.11.0")
    return folder


def build(path, links, *more):
    return main(["env", "build", "--path", str(path), "--find-links", str(links), *more])


def record_of(path):
    return json.loads((path / "llmctl-env.json").read_text())["steps"]


def test_a_failed_build_goes_on_and_a_changed_input_repeats_what_follows(home, links, capfd):
    path = home / AWKWARD
    assert build(path, links) == 3
    told = capfd.readouterr().err
    assert "step llmctl failed (exit status 1)" in told and "  $ " in told
    assert "| ERROR: No matching distribution found for llmctl-pretrain[train]" in told
    assert "no wheel of llmctl-pretrain[train] for this Python" in told
    before = record_of(path)
    assert list(before) == ["venv", "torch"]

    write_llmctl(links)
    assert build(path, links) == 0
    seen = capfd.readouterr()
    assert seen.out == f"{path}/bin/python\n"
    assert "[1/3] venv: done before\n[2/3] torch: done before\n[3/3] llmctl: begins" in seen.err
    first = record_of(path)
    assert {name: first[name] for name in before} == before and list(first) == ["venv", "torch", "llmctl"]
    shown = subprocess.check_output([path / "bin/python", "-c", "import torch, llmctl; print(torch.__version__)"])
    assert shown == b"2.11.0\n"

    assert build(path, links) == 0
    assert capfd.readouterr().err.count("done before") == 3 and record_of(path) == first

    write_torch(links, "2.12.0")
    assert build(path, links, "--torch", "2.12.0") == 0
    told = capfd.readouterr().err
    assert "[1/3] venv: done before\n[2/3] torch: again, since its inputs have changed" in told
    assert "[3/3] llmctl: begins" in told
    shown = subprocess.check_output([path / "bin/python", "-c", "import torch; print(torch.__version__)"])
    assert shown == b"2.12.0\n"

    other = home / "python"
    other.symlink_to(sys.executable)
    assert build(path, links, "--python", str(other), "--torch", "2.10.0") == 3, "the folder has no such torch"
    assert "[1/3] venv: again" in capfd.readouterr().err
    assert list(record_of(path)) == ["venv"] and not list(path.glob("lib/python*/site-packages/torch"))
    # The Python of the folder stays that of the folder.
    assert build(path, links, "--torch", "2.11.0") == 0
    assert "[1/3] venv: done before" in capfd.readouterr().err


def test_a_dry_run_shows_quoted_commands_and_changes_nothing(home, links, capfd):
    before = sorted(home.rglob("*"))
    assert build(home / AWKWARD, links, "--dry-run") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line[:1].isdigit()] == ["1  venv: to do", "2  torch: to do", "3  llmctl: to do"]
    (torch,) = (line.strip() for line in lines if "'torch>=2.10'" in line)
    words = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {torch}"], text=True).splitlines()
    python = f"{home / AWKWARD}/bin/python"
    assert words == [python, "-m", "pip", "install", "--no-index", "--find-links", str(links), "torch>=2.10"]
    assert sorted(home.rglob("*")) == before


def test_a_folder_of_something_else_stays_as_it_is(home, links, capsys):
    own = home / "mine"
    own.mkdir()
    (own / "thesis").touch()
    assert build(own, links) == 3
    assert "holds files that llmctl env build has not made" in capsys.readouterr().err
    assert [path.name for path in own.iterdir()] == ["thesis"]


def test_another_python_is_asked_for(home, links, capfd):
    old = home / "old-python"
    text = sys.executable
    old.write_text(f"#!/bin/sh\nexec {text} -c 'import sys; sys.version_info = (3, 6); exec(sys.argv[2])' \"$@\"\n")
    old.chmod(0o755)
    assert build(home / "env", links, "--python", str(old)) == 3
    told = capfd.readouterr().err
    assert "step venv failed" in told and "this Python is 3.6" in told
    assert "another Python is needed: --python FILE" in told


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 3, "the profile local names no virtual environment; give its folder with --path"),
        (["--path", "e", "--index-url", "https://me:secret@host/simple"], 2, "no address with a password"),
        (["--path", "e", "--torch", "banana"], 2, "--torch banana: is not a version, such as 2.10"),
        (["--path", "e", "--find-links", "missing"], 2, "--find-links missing: is not a folder"),
    ],
)
@pytest.mark.usefixtures("home")
def test_invalid_requests_are_refused(words, code, message, capsys):
    assert main(["env", "build", *words]) == code
    told = capsys.readouterr().err
    assert message in told and "secret" not in told
