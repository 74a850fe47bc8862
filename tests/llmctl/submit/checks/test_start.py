"""The start point of a run, checked before the queue: what it holds, what is told, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmctl.cli.main import main

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100}
TRAIN = (
    "torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size "
    "100 --seq-length 16 --train-iters 2 --lr 1e-3 --mock-data --save ck --load ck"
)

Submit = Callable[[dict[str, Any]], tuple[int, str]]


@pytest.fixture
def submit(home: Path, capsys: pytest.CaptureFixture[str]) -> Submit:
    """A dry run with a section checkpoint; returns exit code and messages."""

    def run(checkpoint: dict[str, Any]) -> tuple[int, str]:
        values = {
            **{"model": MODEL, "optimizer": {"lr": 1e-3}, "data": {"mock_data": True}, "checkpoint": checkpoint},
            "training": {"train_iters": 2, "seq_length": 16, "micro_batch_size": 1, "device": "cpu"},
        }
        (home / "c.yaml").write_text(yaml.safe_dump(values))
        code = main(["submit", "--cluster", "local", "--dry-run", "c.yaml"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def hold(folder: Path) -> None:
    """Let a folder look like one of checkpoints, which only the job reads."""
    (folder / "iter_0000004").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("4")


def test_a_folder_of_both_that_is_not_there_yet_is_a_fresh_start(home: Path, submit: Submit) -> None:
    code, told = submit({"save": "ck", "load": "ck"})
    assert code == 0, told
    assert f"checkpoint.load: {home}/ck does not exist yet, so the run starts with new weights" in told
    assert f"latest checkpoint in {home}/ck; while it holds none, new weights, seed 1234" in told
    (home / "ck").mkdir()
    code, told = submit({"save": "ck", "load": "ck/"})
    assert code == 0 and f"{home}/ck holds no checkpoint yet, so the run starts with new weights" in told
    hold(home / "ck")
    code, told = submit({"save": "ck", "load": "ck"})
    assert code == 0 and "starts with new weights" not in told


@pytest.mark.parametrize("lack", ["does not exist", "holds no checkpoint"])
def test_a_checkpoint_that_must_be_there_is_asked_for_before_the_queue(home: Path, submit: Submit, lack: str) -> None:
    if lack == "holds no checkpoint":
        (home / "ck").mkdir()
    keys = {"save": "ck", "load": "ck", "exit_on_missing_checkpoint": True}
    code, told = submit(keys)
    assert code == 3
    assert f"checkpoint.load: {home}/ck {lack}; checkpoint.exit_on_missing_checkpoint refuses new weights" in told
    hold(home / "ck")
    assert submit(keys)[0] == 0


def test_another_start_point_without_a_checkpoint_is_refused_with_what_megatron_does(
    home: Path, submit: Submit
) -> None:
    cure = "correct the path, or unset the key (checkpoint.load=null) to start with new weights, as Megatron-LM would"
    code, told = submit({"save": "ck", "load": "gone"})
    assert code == 3 and told.count("checkpoint.load:") == 1
    assert f"checkpoint.load: there is no {home}/gone; {cure} without --exit-on-missing-checkpoint" in told
    (home / "gone").mkdir()
    code, told = submit({"save": "ck", "load": "gone"})
    assert code == 3 and f"checkpoint.load: {home}/gone holds no checkpoint; {cure}" in told
    hold(home / "gone")
    (home / "gone/iter_0000004/metadata.json").write_text("{}")
    code, told = submit({"save": "ck", "load": "gone/iter_0000004"})
    assert code == 3 and "gone/iter_0000004 is a single checkpoint, not the folder that contains it" in told


def test_checkpoints_in_save_are_told_beside_a_start_point(home: Path, submit: Submit) -> None:
    hold(home / "start")
    assert "goes on from the latest" not in submit({"save": "ck", "load": "start", "finetune": True})[1]
    hold(home / "ck")
    code, told = submit({"save": "ck", "load": "start", "finetune": True})
    assert code == 0
    assert f"{home}/ck holds checkpoints, so the run goes on from the latest of them and leaves checkpoint.load" in told


def test_a_script_that_fine_tunes_in_place_saves_beside_and_says_so(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold(home / "ck")
    (home / "t.sh").write_text(f"{TRAIN} --finetune\n")
    assert main(["submit", "--cluster", "local", "--dry-run", "t.sh"]) == 0
    captured = capsys.readouterr()
    told = captured.out + captured.err
    assert "t.sh, line 1: --save ck: checkpoints go to ck-finetuned, because --finetune (line 1)" in told
    assert f"weights of {home}/ck" in told
    (home / "t.sh").write_text(f"{TRAIN}\n")
    assert main(["submit", "--cluster", "local", "--dry-run", "t.sh", "--set", "checkpoint.finetune=true"]) != 0
    assert f"save elsewhere, such as in {home}/ck-finetuned, or leave finetune out" in capsys.readouterr().err
