"""Folders of other programs where a checkpoint is expected: recognised, never called damaged."""

import json

import pytest

from trainer.checkpoint.directory import CheckpointError, find_latest
from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.foreign import describe_foreign
from trainer.checkpoint.resume import check_start_point
from trainer.config.errors import ConfigError
from trainer.config.sections.checkpoint import CheckpointConfig

LAYOUTS = {
    "torch": ["iter_0000100/mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt"],
    "pipeline": ["iter_0000100/mp_rank_00_001/model_optim_rng.pt", "latest_checkpointed_iteration.txt"],
    "torch_dist": ["iter_0000100/common.pt", "iter_0000100/__0_0.distcp", "latest_checkpointed_iteration.txt"],
    "zarr": ["iter_0000100/common.pt", "iter_0000100/decoder.final_layernorm.weight/.zarray"],
    "metadata": ["iter_0000100/metadata.json", "iter_0000100/__0_0.distcp"],
    "one iteration": ["mp_rank_00/model_optim_rng.pt"],
}


@pytest.fixture(params=LAYOUTS)
def megatron(request, tmp_path):
    for name in LAYOUTS[request.param]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("100\n")
    return tmp_path


def check_message(message, folder):
    assert message.count(str(folder)) == 1 and "\n" not in message
    assert "Megatron-LM" in message and "llmctl checkpoint import" in message
    assert "damaged" not in message and "remove" not in message


def test_megatrons_checkpoint_is_recognised_as_start_point(megatron):
    with pytest.raises(ConfigError) as caught:
        check_start_point(CheckpointConfig(load=str(megatron)), None)
    check_message(caught.value.problem, megatron)


def test_megatrons_checkpoint_is_recognised_by_commands(megatron):
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(megatron)
    check_message(str(caught.value), megatron)


def test_megatrons_checkpoints_in_the_folder_to_save_in_are_recognised(tmp_path):
    (tmp_path / "iter_0000100/mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100\n")
    with pytest.raises(CheckpointError) as caught:
        find_latest(tmp_path)
    check_message(str(caught.value), tmp_path)


def test_a_hugging_face_folder_is_recognised_by_commands(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="is a Hugging Face folder.*llmctl checkpoint import") as caught:
        find_checkpoint(tmp_path)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("files", [["config.json"], ["iter_0000100/mp_rank_00/model_optim_rng.pt"]])
def test_checkpoints_are_not_saved_among_those_of_another_program(tmp_path, files):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"checkpoint\.save: .*need a folder of their own") as caught:
        check_start_point(CheckpointConfig(), tmp_path)
    assert "damaged" not in str(caught.value)


def test_other_folders_are_none_of_them(tmp_path):
    assert describe_foreign(tmp_path) is None
    assert describe_foreign(tmp_path / "missing") is None
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "iter_0000100/metadata.json").write_text("{}")
    (tmp_path / "config.json").write_text("[]")
    assert describe_foreign(tmp_path) is None
