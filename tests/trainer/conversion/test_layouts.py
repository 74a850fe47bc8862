"""A checkpoint that was trained in any layout exports the bits of the same training on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.checkpoint.test_checkpoint import CPU, VOCAB_SIZE, build, step
from tests.trainer.spawn import Ranks
from trainer.checkpoint.directory import checkpoint_path
from trainer.checkpoint.save import CheckpointWriter
from trainer.config.train_config import TrainConfig
from trainer.conversion.export_hub import Export, export_hub
from trainer.conversion.verify import verify_export
from trainer.families.catalogue import read_model
from trainer.families.deepseek import DEEPSEEK_V3
from trainer.families.format.family import Family
from trainer.families.qwen2 import QWEN2
from trainer.planning.build_config import build_config
from trainer.process.progress import TrainingProgress

STEPS = 2
LENGTH = 8
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2 whole ep2": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "zero1": {"use_distributed_optimizer": True},
    "zero3": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "ep2 zero3": {"expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"},
}
# Biases, a tied table and groups of queries; and latent attention, routed and shared experts with the bias that chooses
# them, a dense layer, a prediction layer and 16-bit weights.
MODELS: dict[str, tuple[Family, dict[str, dict[str, object]]]] = {
    "Qwen2": (QWEN2, {}),
    "DeepSeek-V3": (DEEPSEEK_V3, {"model": {"mtp_num_layers": 1}, "training": {"bf16": True}}),
}
CASES = [(name, layout) for name in MODELS for layout in LAYOUTS if name == "DeepSeek-V3" or "ep2" not in layout]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


def config_of(name: str, parallel: dict[str, object]) -> TrainConfig:
    family, changes = MODELS[name]
    keys = {**family.tiny, "vocab_size": VOCAB_SIZE, "model_type": family.model_type}
    model = read_model(keys, "config.json")[1].model_dump()
    values = {
        "model": {**model, "make_vocab_size_divisible_by": 8},
        "parallel": parallel,
        "training": {"train_iters": 10, "seq_length": LENGTH, "global_batch_size": 2},
        # No norm of gradients, and no product that is rounded: both round differently where tensors are divided.
        "optimizer": {"optimizer": "sgd", "lr": 0.125, "sgd_momentum": 0, "weight_decay": 0, "clip_grad": 0},
    }
    for section, values_of_section in changes.items():
        values[section] |= values_of_section
    return build_config(values)


def train_and_save(rank: int, world_size: int, root: Path, config: TrainConfig) -> None:
    """Some steps with the same gradients in every layout, and a checkpoint."""
    model, optimizer = build(config, rank, world_size)
    for name, buffer in model.buffers.items():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    for number in range(STEPS):
        step(model, optimizer, number)
    writer = CheckpointWriter(root, config, VOCAB_SIZE, 1, CPU)
    writer.prepare(rank)
    writer.save(model, optimizer, TrainingProgress(iteration=STEPS))


def exported(root: Path) -> Path:
    """The Hugging Face folder of the checkpoint in ``root``."""
    export_hub(Export.open(checkpoint_path(root, STEPS)), root / "hub", lambda _: None)
    return root / "hub"


@pytest.fixture(scope="module")
def serial(ranks, tmp_path_factory) -> dict[str, Path]:
    """Folders with the checkpoints and exports of one rank."""
    roots = {name: tmp_path_factory.mktemp("serial") for name in MODELS}
    for name, root in roots.items():
        ranks.run(train_and_save, root, config_of(name, {}), world_size=1)
        exported(root)
    return roots


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_an_export_from_every_layout_has_the_bits_of_one_rank(ranks, serial, tmp_path, name: str, layout: str) -> None:
    ranks.run(train_and_save, tmp_path, config_of(name, LAYOUTS[layout]))
    one, other = serial[name] / "hub", exported(tmp_path)
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
    if layout == "zero3":
        # The checkpoint has float32 masters.
        assert verify_export(checkpoint_path(tmp_path, STEPS), other).is_good


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_a_custom_size_exports_every_weight(serial, name: str) -> None:
    """No published model has these sizes, and the checkpoint has no config.json or files of an origin."""
    pytest.importorskip("transformers")
    weights = load_file(serial[name] / "hub/model.safetensors")
    assert all(tensor.any() for tensor in weights.values())
    found = verify_export(checkpoint_path(serial[name], STEPS), serial[name] / "hub")
    assert found.is_good and found.witness.startswith("transformers") and found.tensors == len(weights)


@pytest.mark.parametrize("name", MODELS)
def test_an_export_has_the_models_positions_and_no_padding_of_the_vocabulary(serial, name: str) -> None:
    """Neither the length of the training samples nor the rows that make the table divisible are of the model."""
    keys = json.loads((serial[name] / "hub/config.json").read_text())
    assert keys["max_position_embeddings"] == MODELS[name][0].tiny["max_position_embeddings"] != LENGTH
    rows = load_file(serial[name] / "hub/model.safetensors")["model.embed_tokens.weight"].shape[0]
    assert keys["vocab_size"] == rows == VOCAB_SIZE
