"""Training that starts from a published folder, without a section ``model``: its first loss is that of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.trainer.families.proofs import record
from tests.trainer.families.published_models import published
from tests.trainer.spawn import DEADLINE_S, Ranks
from trainer.checkpoint.resume import restore
from trainer.config.train_config import TrainConfig
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.families.catalogue import FAMILIES, read_model
from trainer.families.format.family import Family
from trainer.families.llama import LLAMA
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_only
from trainer.planning.build_config import build_config
from trainer.planning.start_model import LocalFiles, completed
from trainer.process.progress import TrainingProgress

CPU = torch.device("cpu")
BOUND = 1e-5
TOKENS = 16
LAYOUTS = {"one rank": (1, {}), "two ranks": (2, {"pipeline_model_parallel_size": 2})}
DECODERS = [
    family
    for family in FAMILIES
    if read_model({"model_type": family.model_type, **family.tiny}, "config.json")[1].architecture == "decoder"
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def text_of(vocab_size: int) -> torch.Tensor:
    return torch.randint(2, vocab_size, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))


def first_loss(rank: int, world_size: int, config: TrainConfig) -> float:
    """Mean loss of the fixed text before the first step; 0 on a rank without the head."""
    assert config.model.vocab_size is not None
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    model = build_model(config, config.model.vocab_size, mesh, groups, CPU)
    optimizer = MixedPrecisionOptimizer(config, model)
    with torch.no_grad():
        for shard in model.gradients.parameter_shards:
            shard.weight.fill_(float("nan"))
    assert restore(config, None, model, optimizer, TrainingProgress(), CPU) is not None
    text = text_of(config.model.vocab_size)
    batch = MicroBatch(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return float(forward_only(model, [batch])) / (2 * TOKENS)


def config_of(source: Path, parallel: dict[str, int]) -> TrainConfig:
    values = {
        "parallel": parallel,
        "training": {"train_iters": 1, "seq_length": TOKENS, "micro_batch_size": 2, "global_batch_size": 2},
        "optimizer": {"lr": 1.0},
        "checkpoint": {"load": str(source)},
        "data": {"mock_data": True},
    }
    return build_config(completed(values, LocalFiles()))


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_the_first_loss_of_a_gguf_file_is_that_of_transformers(ranks: Ranks, tmp_path: Path, model_type: str) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    from tests.trainer.conversion.gguf_files import tiny_model, write_gguf

    path = write_gguf(tmp_path / "model.gguf", tiny_model(model_type), "Q8_0")
    witness = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    text = text_of(witness.config.vocab_size)
    with torch.no_grad():
        logits = witness(text[:, :-1]).logits
    expected = float(F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()))
    for world_size, parallel in [*LAYOUTS.values(), (2, {"tensor_model_parallel_size": 2})]:
        found = [loss for loss in ranks.run(first_loss, config_of(path, parallel), world_size=world_size) if loss]
        assert found and all(abs(loss - expected) <= BOUND for loss in found)


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family is LLAMA else pytest.mark.proof) for family in DECODERS],
    ids=lambda family: family.name,
)
def test_the_first_loss_is_that_of_transformers(ranks: Ranks, tmp_path: Path, family: Family) -> None:
    witness = published(family)
    witness.save_pretrained(tmp_path)
    text = text_of(witness.config.vocab_size)
    with torch.no_grad():
        logits = witness(text[:, :-1]).logits.float()
    expected = float(F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()))
    off = 0.0
    for world_size, parallel in LAYOUTS.values():
        found = [loss for loss in ranks.run(first_loss, config_of(tmp_path, parallel), world_size=world_size) if loss]
        assert found
        off = max(off, *(abs(loss - expected) for loss in found))
    assert off <= BOUND
    record(family.name, "start")
