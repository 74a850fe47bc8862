"""Training resumed from a checkpoint is bitwise equal on the same layout."""

from datetime import timedelta

import pytest
import torch

from tests.trainer.parity.parity_case import ADAM, VOCAB_SIZE, Case
from tests.trainer.spawn import DEADLINE_S
from trainer.checkpoint.resume import restore
from trainer.checkpoint.save import CheckpointWriter
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.optimizer.split_master import joined
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward
from trainer.process.progress import TrainingProgress

CPU = torch.device("cpu")
SAVED_AFTER = 2


def build(rank, world_size, case):
    config = case.config(ADAM)
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    model = build_model(config, VOCAB_SIZE, mesh, groups, CPU)
    return config, model, MixedPrecisionOptimizer(config, model)


def iterate(case, model, optimizer, iteration):
    """One iteration: this rank's share of the loss, and the norm."""
    mesh = model.mesh
    loss = forward_backward(
        model,
        case.batch(iteration)[mesh.dp_rank :: mesh.dp],
        valid_tokens=case.valid_tokens(iteration),
        loss_scale=optimizer.loss_scaler.scale,
        randomness=StepRandomness(7, iteration),
    )
    norm = optimizer.step(ADAM["lr"]).grad_norm
    return float(loss) if mesh.computes_loss and mesh.tp_rank == 0 else 0.0, norm


def train_and_save(rank, world_size, case, root):
    """Save after two iterations, and return the results of two more."""
    config, model, optimizer = build(rank, world_size, case)
    seen = []
    for iteration in range(SAVED_AFTER + 2):
        if iteration == SAVED_AFTER:
            writer = CheckpointWriter(root, config, VOCAB_SIZE, 1, CPU)
            writer.prepare(rank)
            writer.save(model, optimizer, TrainingProgress(iteration=iteration, seed=7))
        seen.append(iterate(case, model, optimizer, iteration))
    return seen[SAVED_AFTER:]


def resume(rank, world_size, case, root):
    """The results of the two iterations after the checkpoint, resumed from it."""
    config, model, optimizer = build(rank, world_size, case)
    progress = TrainingProgress()
    restore(config, root, model, optimizer, progress, CPU)
    return [iterate(case, model, optimizer, progress.iteration + number) for number in range(2)]


def run(ranks, function, case, root):
    """Losses and norms of the whole batch, iteration by iteration."""
    reports = ranks.run(function, case, root, world_size=case.world_size)
    losses = [sum(report[number][0] for report in reports) for number in range(2)]
    return losses, [norm for _, norm in reports[0]]


SAME = {
    "bf16": Case(dp=2, micro_batches=2, precision="bf16"),
    "bf16 zero1": Case(dp=2, micro_batches=2, precision="bf16", zero=1),
    "bf16 zero2": Case(dp=2, micro_batches=2, precision="bf16", zero=2),
    "fp16 zero3": Case(dp=2, micro_batches=2, precision="fp16", zero=3),
    "dropout, pp2 zero3": Case("gpt2", dp=2, pp=2, micro_batches=2, zero=3),
    "kv copies, sequence parallel": Case("qwen", tp=4, sp=True, micro_batches=2),
    "experts": Case("mixtral", dp=2, ep=2, micro_batches=2, zero=1),
    "bf16 gradients, zero1": Case(dp=2, micro_batches=2, precision="bf16", zero=1, steps="adam", gradients="bf16"),
    "remainders": Case(dp=2, micro_batches=2, precision="bf16", remainders=True),
    "remainders, zero1": Case(dp=2, micro_batches=2, precision="bf16", zero=1, moments="bf16", remainders=True),
    "bf16 moments, zero3": Case(dp=2, micro_batches=2, precision="bf16", zero=3, moments="bf16"),
    "bf16 moments, offload": Case(dp=2, micro_batches=2, precision="fp16", zero=1, offload=True, moments="bf16"),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_layout_continues_with_the_same_bits(ranks, tmp_path, name):
    went_on = run(ranks, train_and_save, SAME[name], tmp_path)
    assert run(ranks, resume, SAME[name], tmp_path) == went_on


OTHERS = {
    "tp4 to zero3": (Case("qwen", tp=4, micro_batches=4), Case("qwen", dp=2, pp=2, zero=3, micro_batches=2)),
    "zero3 to cp2": (
        Case("gpt2", dp=4, zero=3, micro_batches=1),
        Case("gpt2", cp=2, tp=2, micro_batches=4),
    ),
    "interleaved to zero2": (Case(pp=2, schedule="interleaved"), Case(dp=2, zero=2, micro_batches=2, layers=5)),
    "zero1 to zb-v": (Case(dp=4, zero=1, micro_batches=1, layers=5), Case(pp=2, schedule="zb-v")),
    "experts": (Case("mixtral", dp=4, ep=4, zero=3, micro_batches=1), Case("mixtral", pp=2, tp=2)),
    "bf16 moments": (Case(dp=4, zero=3, micro_batches=1, moments="bf16"), Case(tp=2, pp=2, moments="bf16")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_layout_continues_with_the_same_loss(ranks, tmp_path, name):
    case, other = OTHERS[name]
    losses, norms = run(ranks, train_and_save, case, tmp_path)
    tokens = [case.valid_tokens(SAVED_AFTER + number) for number in range(2)]
    found_losses, found_norms = run(ranks, resume, other, tmp_path)
    for loss, found, count in zip(losses, found_losses, tokens, strict=True):
        assert found / count == pytest.approx(loss / count, abs=1e-5)
    assert found_norms == pytest.approx(norms, rel=1e-4)


def test_masters_and_weights_cross_precisions_between_stores(ranks, tmp_path):
    """Sharded weights are their own masters; other stores keep masters beside 16-bit weights."""
    sharded = Case(dp=2, micro_batches=2, precision="bf16", zero=3)
    run(ranks, train_and_save, sharded, tmp_path / "sharded")
    ranks.run(agree_on_weights, SAME["bf16"], tmp_path / "sharded", world_size=2)
    run(ranks, train_and_save, SAME["bf16 zero1"], tmp_path / "masters")
    ranks.run(agree_on_weights, sharded, tmp_path / "masters", world_size=2)
    ranks.run(agree_on_weights, SAME["remainders"], tmp_path / "masters", world_size=2)
    run(ranks, train_and_save, SAME["remainders, zero1"], tmp_path / "remainders")
    for case in (SAME["bf16"], SAME["remainders"], sharded):
        ranks.run(agree_on_weights, case, tmp_path / "remainders", world_size=2)


def agree_on_weights(rank, world_size, case, root):
    full_case = case.but(dp=1, zero=0, precision="fp32", moments="fp32", remainders=False)
    config, model, optimizer = build(rank, world_size, case)
    restore(config, root, model, optimizer, TrainingProgress(), CPU)
    full_config = full_case.config(ADAM)
    full = build_model(full_config, VOCAB_SIZE, ParallelMesh(1, 1, 1, 0), ProcessGroups(), CPU)
    restore(full_config, root, full, MixedPrecisionOptimizer(full_config, full), TrainingProgress(), CPU)
    masters = optimizer.tensors().get("master", {})
    for shard in model.gradients.parameter_shards:
        expected = full.parameters[shard.name].detach().view(-1)[shard.start : shard.stop]
        assert torch.equal(joined(masters.get(shard.name, shard.weight)), expected)
        assert torch.equal(shard.weight, expected.to(shard.weight.dtype))
