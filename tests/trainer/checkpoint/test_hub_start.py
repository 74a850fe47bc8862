"""Training that starts from a Hugging Face folder, or from a checkpoint that was imported from one, in any layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.checkpoint.test_checkpoint import CPU, build, save, step
from trainer.checkpoint.directory import AnotherModelError, CheckpointError, checkpoint_path
from trainer.checkpoint.resume import check_start_point, restore
from trainer.checkpoint.save import CheckpointWriter
from trainer.conversion.export_hub import Export, export_hub
from trainer.conversion.import_hub import import_hub
from trainer.data.samples.micro_batch import MicroBatch
from trainer.families.catalogue import read_model
from trainer.families.llama import LLAMA
from trainer.hub.folder import HubFolder
from trainer.pipeline.executor import forward_only
from trainer.planning.build_config import build_config
from trainer.process.progress import TrainingProgress

RANKS = 2

VOCAB_SIZE = 50
KEYS = {**LLAMA.tiny, "vocab_size": VOCAB_SIZE, "model_type": "llama"}
LAYOUTS = {
    "serial": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "zero3": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
}


def config_of(parallel=None, *, checkpoint=None, **changes):
    model = read_model(KEYS, "config.json")[1].model_dump()
    return build_config(
        {
            "model": {**model, "make_vocab_size_divisible_by": 8, **changes},
            "parallel": parallel or {},
            "training": {"train_iters": 10, "seq_length": 8, "global_batch_size": 2},
            "optimizer": {"lr": 0.1},
            "checkpoint": checkpoint or {},
        }
    )


@pytest.fixture(scope="module")
def hub_folder(ranks, tmp_path_factory):
    """A Hugging Face folder with random weights, a tokenizer file, and a key that only config.json has."""
    root = tmp_path_factory.mktemp("hub")
    ranks.run(save, root / "native", config_of(), 1, world_size=1)
    export_hub(Export.open(checkpoint_path(root / "native", 1)), root / "folder", print)
    (root / "folder" / "tokenizer.json").write_text("{}")
    keys = json.loads((root / "folder" / "config.json").read_text())
    (root / "folder" / "config.json").write_text(json.dumps({**keys, "bos_token_id": 7}))
    return root / "folder"


def start(rank, world_size, config, target):
    """Start from config.checkpoint.load, save into ``target``; the loss of a fixed text and the progress."""
    model, optimizer = build(config, rank, world_size)
    with torch.no_grad():
        for shard in model.gradients.parameter_shards:
            shard.weight.fill_(float("nan"))
    progress = TrainingProgress(seed=3)
    writer = CheckpointWriter(target, config, VOCAB_SIZE, 1, CPU)
    writer.prepare(rank)
    restored = restore(config, target, model, optimizer, progress, CPU)
    writer.save(model, optimizer, progress)
    text = torch.randint(0, VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(1))
    loss = forward_only(model, [MicroBatch(text[:, :-1].contiguous(), text[:, 1:].contiguous())])
    step(model, optimizer, 0)
    weights = [shard.weight.detach().clone() for shard in model.gradients.parameter_shards]
    assert all(torch.isfinite(weight).all() for weight in weights)
    return float(loss), progress, restored, optimizer.steps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_starts_from_the_folder(ranks, hub_folder, tmp_path, layout):
    world_size, parallel = LAYOUTS[layout]
    load = {"load": str(hub_folder)}
    [(expected, *_)] = ranks.run(start, config_of(checkpoint=load), tmp_path / "serial", world_size=1)
    answers = ranks.run(start, config_of(parallel, checkpoint=load), tmp_path / "saved", world_size=world_size)
    losses = [loss for loss, *_ in answers if loss]
    assert losses and losses == pytest.approx([expected] * len(losses), rel=1e-6)
    for _, progress, restored, steps in answers:
        assert (progress, restored, steps) == (TrainingProgress(seed=3), hub_folder, 1)
    export_hub(Export.open(checkpoint_path(tmp_path / "saved", 0)), tmp_path / "exported", print)
    check_equal_folders(hub_folder, tmp_path / "exported")


def check_equal_folders(one: Path, other: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    assert (other / "tokenizer.json").read_text() == "{}"
    assert json.loads((other / "config.json").read_text())["bos_token_id"] == 7


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_an_imported_checkpoint_needs_no_further_key(ranks, hub_folder, tmp_path, layout):
    world_size, parallel = LAYOUTS[layout]
    with HubFolder(hub_folder) as source:
        import_hub(source, tmp_path / "imported", print)
    config = config_of(parallel, checkpoint={"load": str(tmp_path / "imported")})
    for _, progress, restored, steps in ranks.run(start, config, tmp_path / "saved", world_size=world_size):
        assert (progress, restored.name, steps) == (TrainingProgress(seed=3), "iter_0000000", 1)
    export_hub(Export.open(checkpoint_path(tmp_path / "saved", 0)), tmp_path / "exported", print)
    check_equal_folders(hub_folder, tmp_path / "exported")


def test_the_next_attempt_resumes_its_own_checkpoint(ranks, hub_folder, tmp_path):
    config = config_of(checkpoint={"load": str(hub_folder)})
    for expected in (hub_folder, checkpoint_path(tmp_path, 0)):
        [(_, _, restored, _)] = ranks.run(start, config, tmp_path, world_size=1)
        assert restored == expected


@pytest.mark.parametrize("source", ["folder", "imported"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"norm_epsilon": 1e-5}, "model.norm_epsilon 1e-06, but this run has 1e-05; set it to 1e-06"),
        ({"num_query_groups": 8}, "model.num_query_groups 4, but this run has 8; set it to 4"),
        ({"rope_scaling": None}, "model.rope_scaling"),
    ],
)
def test_another_model_is_refused_by_its_first_key(ranks, hub_folder, tmp_path, source, changes, says):
    folder = hub_folder
    if source == "imported":
        folder = tmp_path / "imported"
        with HubFolder(hub_folder) as opened:
            import_hub(opened, folder, print)
    config = config_of(checkpoint={"load": str(folder)}, **changes)
    [message] = ranks.run(refused, config, tmp_path / "saved", world_size=1)
    assert message.startswith(f"AnotherModelError: {folder}") and says in message


def test_finetuning_may_scale_positions(ranks, hub_folder, tmp_path):
    config = config_of(checkpoint={"load": str(hub_folder), "finetune": True}, rope_scaling=None)
    [(_, _, restored, _)] = ranks.run(start, config, tmp_path, world_size=1)
    assert restored == hub_folder


def refused(rank, world_size, config, target):
    model, optimizer = build(config, rank, world_size)
    try:
        restore(config, target, model, optimizer, TrainingProgress(), CPU)
    except (AnotherModelError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_damaged_folder_names_its_file(ranks, hub_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((hub_folder / "config.json").read_bytes())
    config = config_of(checkpoint={"load": str(tmp_path)})
    [message] = ranks.run(refused, config, tmp_path / "saved", world_size=1)
    assert message == f"CheckpointError: {tmp_path}/model.safetensors: is missing, although config.json is there"


def test_the_folder_is_a_start_point(hub_folder, tmp_path):
    check_start_point(config_of(checkpoint={"load": str(hub_folder)}).checkpoint, tmp_path)
