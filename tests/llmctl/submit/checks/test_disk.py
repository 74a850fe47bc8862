"""Disk room of the checkpoints to come, beside what a real run writes."""

import json
from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.submit.preview.disk import checkpoints_kept, checkpoints_text
from trainer.planning.build_config import build_config

GIB = 1 << 30


def config_of(**checkpoint: object):
    return build_config(
        {
            "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2},
            "training": {"train_iters": 100, "seq_length": 8},
            "optimizer": {"lr": 0.1},
            "data": {"mock_data": True},
            "checkpoint": checkpoint,
        }
    )


@pytest.mark.parametrize(
    ("checkpoint", "kept"),
    [
        ({}, 1),
        ({"save_interval": 10}, 10),
        ({"save_interval": 30}, 4),
        ({"save_interval": 1000}, 1),
        ({"save_interval": 10, "keep_last": 2}, 3),
        ({"save_interval": 50, "keep_last": 5}, 2),
    ],
)
def test_the_last_checkpoint_and_the_one_being_written_count(checkpoint, kept):
    assert checkpoints_kept(config_of(**checkpoint)) == kept


def test_what_does_not_fit_is_told_with_a_cure():
    config, parameters = config_of(save_interval=10), GIB // 12
    assert checkpoints_text(config, parameters, 20 * GIB) == "10 checkpoints of 1 GiB = 10 GiB; 20 GiB are free"
    assert checkpoints_text(config, parameters, 5 * GIB) == (
        "10 checkpoints of 1 GiB = 10 GiB, but only 5 GiB are free; checkpoint.keep_last=4 keeps fewer"
    )
    assert checkpoints_text(config, parameters, GIB) == "10 checkpoints of 1 GiB = 10 GiB, but only 1 GiB are free"
    assert checkpoints_text(config_of(), parameters, GIB // 2) == "1 checkpoint of 1 GiB, but only 0.5 GiB are free"


def test_the_size_is_that_of_a_real_checkpoint(own_folders: Path, capsys):
    small = ["--set", "model.num_layers=1", "--set", "training.train_iters=1", "--set", "training.eval_iters=0"]
    where = ["--set", f"checkpoint.save={own_folders}/saved", "--set", "training.kernel_backend=reference"]
    assert main(["submit", "--follow", *where, *small]) == 0
    capsys.readouterr()
    assert main(["submit", "--dry-run", "--json", *small]) == 0
    parameters = json.loads(capsys.readouterr().out)["plan"]["parameters"]
    (saved,) = own_folders.rglob("iter_0000001")
    size = sum(path.stat().st_size for path in saved.iterdir())
    assert size == pytest.approx(12 * parameters, rel=0.02)
