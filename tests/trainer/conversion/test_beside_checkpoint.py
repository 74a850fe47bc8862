"""checkpoint.save_hugging_face: a folder beside each kept checkpoint, and a failure that costs nothing else."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.resume_torture import Attempt, config_of
from tests.trainer.checkpoint.test_directory import fake
from tests.trainer.spawn import Ranks
from trainer.checkpoint.directory import (
    checkpoint_path,
    complete_iterations,
    hub_path,
    prune,
    publish,
    remove_leftovers,
)
from trainer.config.errors import ConfigError
from trainer.conversion import beside_checkpoint
from trainer.conversion.beside_checkpoint import write_hub_folder
from trainer.conversion.export_hub import Export, export_hub
from trainer.planning.build_config import build_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[False, True], ids=["between steps", "beside steps"])
def run(tmp_path_factory, request):
    """A run of two pipeline stages that saves six times and keeps two checkpoints."""
    folder = tmp_path_factory.mktemp("beside") / "run"
    values = config_of("pp2")
    values["training"] |= {"train_iters": 6, "eval_iters": 0, "bf16": True}
    values["checkpoint"] |= {"save_interval": 1, "save_hugging_face": True, "async_save": request.param}
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(values))
    with Attempt(folder, 1) as attempt:
        assert attempt.finish() == "completed"
    return folder


def test_each_kept_checkpoint_has_a_folder_with_its_weights(run, tmp_path):
    root = run / "checkpoints"
    assert complete_iterations(root) == [5, 6]
    assert sorted(path.name for path in root.glob(".*")) == []
    assert sorted(path.name for path in root.glob("*hugging_face*")) == [hub_path(root, i).name for i in (5, 6)]
    export_hub(Export.open(checkpoint_path(root, 6)), tmp_path / "later", lambda _: None)
    now, later = (load_file(folder / "model.safetensors") for folder in (hub_path(root, 6), tmp_path / "later"))
    assert now.keys() == later.keys()
    assert all(torch.equal(now[name], later[name]) and now[name].dtype == torch.bfloat16 for name in now)
    assert json.loads((hub_path(root, 6) / "config.json").read_text())["model_type"] == "gpt2"
    log = (run / "attempts/1/rank-00000.log").read_text()
    assert log.count("Hugging Face folder written in") == 6


def failing(rank, _world_size, root):
    """The answer of each rank when rank 0 fails in the middle of a tensor."""

    def fail(_export, output, advance):
        advance(beside_checkpoint._BYTES_PER_ROUND)
        output.with_name(f".{output.name}.unfinished").mkdir()
        raise MemoryError

    beside_checkpoint.export_hub = fail
    return write_hub_folder(root, 6, rank, CPU)


def test_a_failure_is_told_and_leaves_the_checkpoint(run, tmp_path):
    checkpoint_path(tmp_path, 6).symlink_to(checkpoint_path(run / "checkpoints", 6))
    with Ranks(2) as ranks:
        assert ranks.run(failing, tmp_path) == ["MemoryError", None]
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000006"]


def test_a_folder_goes_with_its_checkpoint(tmp_path):
    for iteration in (1, 2, 3):
        fake(tmp_path, iteration)
        hub_path(tmp_path, iteration).mkdir()
    prune(tmp_path, 2, 3, 1)
    assert not hub_path(tmp_path, 1).exists() and hub_path(tmp_path, 2).exists()
    # Iteration 3 is trained again from iteration 2: the folder of the older weights must not stay beside the newer.
    (tmp_path / ".iter_0000003.tmp-2").mkdir()
    publish(tmp_path / ".iter_0000003.tmp-2", tmp_path, 3, 2)
    assert complete_iterations(tmp_path) == [2, 3] and not hub_path(tmp_path, 3).exists()
    (tmp_path / ".iter_0000004_hugging_face.unfinished").mkdir()
    (tmp_path / ".iter_0000002_hugging_face.old-1").mkdir()
    assert len(remove_leftovers(tmp_path)) == 2
    assert hub_path(tmp_path, 2).exists()


def test_a_model_of_no_family_is_refused_with_its_differences():
    values = config_of("tp2")
    values["checkpoint"] |= {"save_hugging_face": True}
    build_config(values)
    values["model"] |= {"squared_relu": True}
    with pytest.raises(ConfigError) as caught:
        build_config(values)
    message = str(caught.value)
    assert message.startswith(
        "checkpoint.save_hugging_face: no published family has this model section, so that no program could read"
    )
    assert "the nearest is GPT-2, with model.activation_func gelu_tanh (here squared_relu)" in message
    del values["model"]["squared_relu"]
    values["model"] |= {"embedding_layer_norm": True}
    with pytest.raises(ConfigError, match="the nearest is GPT-2, with model.embedding_layer_norm False"):
        build_config(values)
    values["checkpoint"] |= {"save_hugging_face": False}
    build_config(values)
