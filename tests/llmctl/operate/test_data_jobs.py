"""Data commands here and as jobs on several nodes, and requests that are refused early."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.operate.trainer_jobs import TrainerWork
from tests.llmctl.login_node import started_with, write_cluster
from tests.waiting import HANG_S, children_of, wait_for, wait_for_ends
from trainer.data.indexed.indexed_dataset import IndexedDataset

ROOT = str(Path(__file__).parents[3])
NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--append-eod"]


@pytest.fixture
def place(login_node, home):
    """A separate home, 2 MB of text, and cluster lab with this login node."""
    kinds = {"gpu": {"gpus": 8}, "small": {"gpus": 0, "max_nodes": 1}, "cpu": {"gpus": 0}}
    for name, changes in {"lab": {}, "far": {"login": {"host": "far.invalid"}}, "apart": {"shared": False}}.items():
        write_cluster(home, name, resource_types=kinds, **changes)
    line = json.dumps({"text": "1 2 3 " * 50, "title": "4"}) + "\n"
    (login_node / "in.jsonl").write_text(line * 6500)
    return home


def test_two_nodes_make_the_same_bytes_as_this_machine(place, capfd):
    flags = [*NUMBERS, "--json-keys", "title", "--json-keys", "text", "--workers", "1"]
    assert main(["data", "prepare", "in.jsonl", "--output", "one/a b", *flags]) == 0
    assert "one/a b_title_document.bin, .idx and .json: 6,500 documents, 13,000 tokens" in capfd.readouterr().out
    command = ["data", "prepare", "*.jsonl", "--output", "two/a b", *flags, "--nodes", "2", "--follow"]
    assert main(command) == 0
    made = {path.name: path.read_bytes() for path in (place / "one").iterdir()}
    assert {path.name: path.read_bytes() for path in (place / "two").iterdir()} == made
    assert len(made) == 6
    with IndexedDataset(place / "two/a b_text_document") as dataset:
        assert dataset[6499].tolist() == [1, 2, 3] * 50 + [1000]


def test_the_work_ends_when_llmctl_is_killed_alone(place, capfd):
    assert main(["data", "prepare", "in.jsonl", "--output", "whole/n", *NUMBERS, "--workers", "1"]) == 0
    command = ["data", "prepare", "in.jsonl", "--output", "killed/n", *NUMBERS, "--workers", "2"]
    with subprocess.Popen([sys.executable, "-m", "llmctl", *command], env={**os.environ, "PYTHONPATH": ROOT}) as llmctl:
        partial = wait_for(lambda: [*place.glob("killed/n.preparing/*/*.shard.*.partial")], "a worker at work")[0]
        children = children_of(llmctl.pid)
        os.kill(int(partial.suffixes[-2][1:]), signal.SIGSTOP)  # so that the work cannot come to its end
        llmctl.kill()
    assert len(children) >= 3
    wait_for_ends(children)
    assert f"its parent, process {llmctl.pid}, is gone" in capfd.readouterr().err
    assert main(command) == 0
    whole, after = ({file.name: file.read_bytes() for file in (place / name).iterdir()} for name in ("whole", "killed"))
    assert after == whole


def test_megatron_flags_and_llmctl_flags_make_the_same_bytes(place):
    given = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--workers", "1"]
    ours = [*("prepare", "--json-keys", "title", "in.jsonl", "--json-keys", "text"), "--output", "ours/n", *given]
    theirs = ["prepare", "--input", "in.jsonl", "--json-keys", "title", "text", "--output-prefix", "theirs/n", *given]
    assert [main(["data", *words]) for words in (ours, [*theirs, "--dataset-impl", "mmap"])] == [0, 0]
    made = {path.name: path.read_bytes() for path in (place / "ours").iterdir()}
    assert {path.name: path.read_bytes() for path in (place / "theirs").iterdir()} == made
    assert len(made) == 6


def test_errors_are_found_before_the_queue(place, monkeypatch):
    monkeypatch.setenv("STATUS", "3")
    command = ["data", "prepare", "in.jsonl", "x", "--output", "o", "--tokenizer", "t", "--split-sentences"]
    more = ["--tiktoken-num-special-tokens", "10", "--tokenizer-hf-include-special-tokens"]
    more += ["--tiktoken-pattern", "v1", "--special-tokens", "<E>", "--special-tokens", "<F>"]
    assert main([*command, *more, "--on-error", "skip", "--cluster", "lab", "--nodes", "2"]) == 3
    words = [*command[2:], *more, "--on-error", "skip"]
    assert started_with(place) == ["trainer", "data", "prepare", "--check", *words]
    # No record: only the digest of the code is remembered.
    assert {path.name for path in place.glob("state/llmctl/*")} <= {"code"}


@pytest.mark.usefixtures("place")
def test_the_job_uses_nodes_without_gpus(capsys):
    command = ["data", "prepare", "in.jsonl", "--output", "o", *NUMBERS, "--cluster", "lab", "--nodes", "2"]
    assert main([*command, "--show-script", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)
    assert "#SBATCH --nodes=2" in job["script"]
    assert "--gpus-per-node" not in job["script"]
    assert '/code/trainer" data prepare --nodes' in job["script"]
    assert "prepare-" in job["run_id"]


def test_restart_applies_to_the_first_attempt_only(place, monkeypatch):
    work = TrainerWork(("data", "prepare"), ("--output=o", "--restart", "a b"), ("a b", "o"), by_nodes=True)
    monkeypatch.setenv("NNODES", "1")
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("LLMCTL_RUN_ID", "r")
    for attempt, restart in (("1", ["--restart"]), ("2", [])):
        monkeypatch.setenv("LLMCTL_ATTEMPT", attempt)
        subprocess.run(work.job_command(str(place / "python of jobs")), check=True, timeout=HANG_S)
        words = ["--nodes", "1", "--node", "0", "--attempt", f"r.{attempt}", *restart]
        assert started_with(place) == ["trainer", "data", "prepare", *words, "--output=o", "a b"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cluster", "far"], "in.jsonl: paths on the machines of far must begin with / or ~/"),
        (["--cluster", "apart", "--nodes", "2"], "--nodes 2: all nodes must see the output, and the hosts of apart"),
        (["--nodes", "2", "--restart"], "--restart: several nodes would discard each other's work"),
    ],
)
def test_invalid_requests_are_refused(place, capsys, arguments, says):
    assert main(["data", "prepare", "in.jsonl", "--output", "o", *NUMBERS, *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not started_with(place)
