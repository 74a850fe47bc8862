"""Two packages called trainer: llmctl finds its own, and a user's COMMAND the user's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmctl.cli.main import main
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
START = "from llmctl.cli.main import run; run()"
WANTED = "from trainer import Trainer; Trainer().greet()"
TRAINER = "class Trainer:\n    def greet(self):\n        print('their own')\n"


@pytest.fixture
def theirs(home, monkeypatch):
    """A project with a package called trainer, outside of the working directory."""
    project = home / "project"
    (project / "trainer").mkdir(parents=True)
    (project / "trainer/__init__.py").write_text(TRAINER)
    monkeypatch.chdir(home)
    monkeypatch.setenv("PYTHONPATH", f"{project}:{ROOT}")
    return project


def llmctl(cwd: Path, *words: str | Path, start: tuple[str, ...] = ("-m", "llmctl")) -> str:
    done = subprocess.run(
        [sys.executable, *start, *words], cwd=cwd, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("start", [("-m", "llmctl"), ("-c", START), "script"])
@pytest.mark.parametrize("place", ["folder", "file", "PYTHONPATH"])
def test_llmctl_finds_its_own_trainer(theirs, home, monkeypatch, start, place):
    if place != "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if place == "file":
        (home / "trainer.py").write_text(TRAINER)
    if start == "script":
        (home / "bin").mkdir()
        (home / "bin/llmctl").write_text(START)
        start = (str(home / "bin/llmctl"),)
    cwd = theirs if place == "folder" else home
    assert "-m trainer pretrain" in llmctl(
        cwd, "submit", "--show-script", ROOT / "examples/gpt_small.yaml", start=start
    )


def test_a_command_imports_the_users_trainer(theirs, home, monkeypatch):
    words = ("submit", "--follow", "--", sys.executable, "-c", WANTED)
    assert "their own" in llmctl(home, *words)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert "their own" in llmctl(theirs, *words)
    coded = ("submit", "--follow", "--set", f"job.code=[{theirs}/.]", "--", sys.executable, "-c", WANTED)
    assert "their own" in llmctl(home, *coded)


def test_an_interactive_command_imports_the_users_trainer(theirs, home):
    assert llmctl(home, "interactive", "--", sys.executable, "-c", WANTED) == "their own\n"
    assert theirs.is_dir()


def test_work_of_our_trainer_beside_another(theirs):
    (theirs / "in.jsonl").write_text(json.dumps({"text": "1 2 3"}) + "\n")
    words = ("data", "prepare", "in.jsonl", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--workers", "1")
    llmctl(theirs, *words, "--output", "here/n")
    llmctl(theirs, *words, "--output", "there/n", "--nodes", "2", "--follow")
    made = {path.name: path.read_bytes() for path in (theirs / "here").iterdir()}
    assert {path.name: path.read_bytes() for path in (theirs / "there").iterdir()} == made and len(made) == 3


@pytest.mark.parametrize("code", ["project/trainer", "project/.", "one/trainer.py", "two/trainer.cpython-311-x.so"])
def test_a_training_run_with_another_trainer_is_refused(theirs, home, capsys, code):
    for name in ("one/trainer.py", "two/trainer.cpython-311-x.so"):
        (home / name).parent.mkdir()
        (home / name).write_text(TRAINER)
    assert theirs.is_dir()
    words = ["submit", "--dry-run", str(ROOT / "examples/gpt_small.yaml"), "--set", f"job.code=[{code}]"]
    assert main(words) == 3
    said = capsys.readouterr().err
    assert f"job.code: {home}/{code.removesuffix('/.')}" in said
    assert "would be imported as the module trainer" in said


def test_other_names_are_accepted_beside_a_training_run(theirs, home):
    (home / "lib").mkdir()
    (home / "lib/trainer_tools.py").write_text("")
    (home / "lib/trainer.yaml").write_text("")
    words = ["submit", "--dry-run", str(ROOT / "examples/gpt_small.yaml"), "--set", f"job.code=[lib/.,{theirs}]"]
    assert main(words) == 0
