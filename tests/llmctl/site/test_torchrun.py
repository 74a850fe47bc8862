"""``llmctl submit --torchrun``: a user's own program in every rank, by torchrun."""

import json
from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.errors import UsageError
from llmctl.site.torchrun import torchrun_words
from tests.waiting import wait_for

PROGRAM = """\
import json, os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
with open(f"rank-{dist.get_rank()}.json", "w") as file:
    json.dump([dist.get_world_size(), total.item(), os.environ["NODE_RANK"], sys.argv[1:]], file)
dist.destroy_process_group()
"""


@pytest.fixture
def work(home, monkeypatch):
    """A working directory with ``my train.py``."""
    folder = home / "work"
    folder.mkdir()
    (folder / "my train.py").write_text(PROGRAM)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("words", [["my train.py"], ["-m", "my train"]])
def test_the_ranks_of_two_nodes_meet(work, words, capsys):
    assert main(["submit", "--torchrun", "--nodes", "2", "--run-id", "r", "--", *words, "--lr", "a 'b'"]) == 0
    run = work.parent / "runs/r"
    end = run / "attempts/1/exit.json"
    wait_for(end.exists, (run / "job.log").read_text)
    assert json.loads(end.read_text())["code"] == 0, "".join(path.read_text() for path in run.glob("attempts/1/node*"))
    for rank in (0, 1):
        seen = json.loads((work / f"rank-{rank}.json").read_text())
        assert seen == [2, 3.0, str(rank), ["--lr", "a 'b'"]]
    capsys.readouterr()
    assert main(["resume", "r", "--dry-run", "--json"]) == 0
    assert " -m torch.distributed.run --nnodes 2 " in json.loads(capsys.readouterr().out)["script"]


@pytest.mark.usefixtures("work")
def test_a_python_script_as_config_is_told_how_to_run(capsys):
    for words in (["my train.py"], ["my train.py", "3"]):
        assert main(["submit", *words]) == 2
        assert "`llmctl submit --torchrun -- my train.py ARGS` starts it in every rank" in capsys.readouterr().err
    assert main(["submit", "--torchrun", "--dry-run", "--", "bash", "x.sh"]) == 2
    assert "'bash' is neither a Python script nor -m MODULE" in capsys.readouterr().err
    assert main(["submit", "--torchrun", "--dry-run"]) == 2
    assert "no program is given" in capsys.readouterr().err
    assert not Path("rank-0.json").exists()


def test_the_interpreter_is_that_of_the_jobs_unless_a_path_names_one():
    words = torchrun_words(["python3.11", "-m", "pkg.train", "-x"], "/jobs/python")
    assert (words.python, words.program, words.name) == ("/jobs/python", ("-m", "pkg.train", "-x"), "pkg.train")
    words = torchrun_words(["/mine/bin/python", "dir/train.py"], "/jobs/python")
    assert (words.python, words.program, words.name) == ("/mine/bin/python", ("dir/train.py",), "train")
    for wrong in ([], ["-m"], ["python"], ["python", "-c", "1"], ["torchrun", "train.py"]):
        with pytest.raises(UsageError, match="give -- script.py ARGS"):
            torchrun_words(wrong, "/jobs/python")
