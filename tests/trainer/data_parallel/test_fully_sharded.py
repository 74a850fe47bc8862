"""ZeRO-2 and ZeRO-3: equal results, a share of the memory, no stale weights."""

import functools
import gc
import math
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.trainer.parity.layout_parity import compare, problems
from tests.trainer.parity.parity_case import ADAM, VOCAB_SIZE, Case
from tests.trainer.spawn import DEADLINE_S, Ranks
from trainer.data_parallel.fully_sharded import FullyShardedStore
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward, forward_logits, forward_only

CASES = [
    # The rows of some parameters are not a multiple of the number of ranks.
    Case(dp=3, zero=2, micro_batches=2),
    Case("gpt2", dp=4, zero=3, micro_batches=2),
    Case("gpt2", dp=2, zero=2, micro_batches=3, recompute="modules"),
    Case("gpt2", dp=2, tp=2, zero=3, sp=True, micro_batches=2),
    # A tied table on two stages; backward of one micro-batch after forward of the next.
    Case("gpt2", dp=2, pp=2, zero=3, micro_batches=4),
    Case("gpt2", dp=2, pp=2, zero=2, micro_batches=4, schedule="gpipe"),
    Case(dp=2, pp=2, zero=3, micro_batches=4, schedule="interleaved", recompute="uniform"),
    Case("gpt2", dp=2, cp=2, zero=3, micro_batches=2),
    Case("qwen", cp=2, tp=2, zero=2, micro_batches=2, documents=True),
    # Experts sharded over fewer ranks than the rest, or over this rank alone.
    Case("mixtral", dp=4, ep=2, zero=3, micro_batches=2),
    Case("capacity", dp=2, ep=2, zero=3, micro_batches=2, recompute="block"),
    Case("mixtral", dp=2, pp=2, ep=2, zero=2, micro_batches=2, recompute="uniform"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_and_steps_are_those_of_the_serial_run(ranks, serials, case):
    assert problems(case, compare(ranks, serials, case)) == []


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bit_gradients_are_close(ranks, serials, zero, precision):
    found = compare(ranks, serials, Case(dp=2, zero=zero, micro_batches=2, precision=precision))
    digits = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    assert found.gradient < digits
    assert found.loss < digits
    assert found.grad_norm < 4 * digits


def test_copies_of_key_and_value_heads(serials):
    case = Case("qwen", dp=2, tp=4, zero=3, micro_batches=2)
    with Ranks(8) as many:
        assert problems(case, compare(many, serials, case)) == []


def build(rank, world_size, case):
    config = case.config(ADAM)
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    model = build_model(config, VOCAB_SIZE, mesh, groups, torch.device("cpu"))
    return model, MixedPrecisionOptimizer(config, model)


def iterate(case, model, optimizer, iteration):
    forward_backward(
        model,
        case.batch(iteration)[model.mesh.dp_rank :: model.mesh.dp],
        valid_tokens=case.valid_tokens(iteration),
        loss_scale=1.0,
        randomness=StepRandomness(7, iteration),
    )
    optimizer.step(ADAM["lr"])


@pytest.mark.parametrize("case", [Case(dp=4, zero=2, micro_batches=1), Case("mixtral", dp=4, zero=3, micro_batches=1)])
def test_every_rank_holds_its_share_and_nothing_more(ranks, case):
    for held, whole in ranks.run(memory, case):
        # Weights, gradients and two moments, float32. Rows do not divide evenly: the last shards are smaller.
        assert held == pytest.approx(4 * 4 * whole / 4, rel=0.01)


def memory(rank, world_size, case):
    """Bytes of the tensors that survive an iteration, and elements of the whole model."""
    before = living_bytes()
    model, optimizer = build(rank, world_size, case)
    iterate(case, model, optimizer, 0)
    assert isinstance(model.gradients, FullyShardedStore)
    whole = sum(math.prod(layout.local_shape(model.mesh)) for layout in model.layouts.values())
    return living_bytes() - before, whole


def living_bytes():
    """Bytes of all live float32 tensors, counting shared memory once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and not isinstance(found, DTensor) and found.dtype == torch.float32:
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(("zero", "gathers"), [(2, 10), (3, 3 * (10 + 7))])
def test_stage_2_gathers_once_per_iteration_and_stage_3_every_time(ranks, zero, gathers):
    """There are ten units: seven layers, embedding, head and the final norm.

    Backward needs no embedding, and returns to head and norm at once.
    """
    case = Case(dp=2, zero=zero, micro_batches=3, layers=7)
    assert ranks.run(count_collectives, case, world_size=2) == [{"gather": 2 * gathers, "scatter": 2 * 3 * 10}] * 2


@pytest.mark.parametrize(
    ("case", "first", "last"),
    [
        # Four layers with the embedding, three with head and norm; four micro-batches, of which two are under way.
        (Case(dp=2, pp=2, zero=3, layers=7), 1 + 2 * 4, 2 * (3 + 2)),
        (Case(dp=2, pp=2, zero=3, recompute="uniform", layers=7), 1 + 2 * 4, 2 * (3 + 2)),
        # Two chunks per rank: the first rank has two layers in each, the last two and one.
        (Case(dp=2, pp=2, zero=3, schedule="interleaved", layers=7), 1 + 2 * 4, 2 * (3 + 2)),
        # Experts are divided over two ranks, and their copies over two others: seven more units. Without stages one
        # micro-batch at a time is under way.
        (Case("mixtral", dp=4, ep=2, zero=3, recompute="uniform", micro_batches=2, layers=7), 17 + 14, 17 + 14),
    ],
    ids=str,
)
def test_no_unneeded_weights_are_gathered(ranks, case, first, last):
    """Weights are gathered once for forward and once for backward.

    This holds for any number of micro-batches under way and any recompute.
    """
    for rank, seen in enumerate(ranks.run(count_collectives, case)):
        assert seen["gather"] == 2 * case.micro_batches * (first if rank < 2 else last), rank


def test_every_rank_makes_a_group_of_one_where_any_has_experts_alone(ranks):
    """NCCL needs all ranks for the split.

    The ranks of the second stage have no layer with experts.
    """
    for rank, timeouts in enumerate(ranks.run(groups_of_one, Case("mixtral", dp=2, pp=2, ep=2, zero=3))):
        assert timeouts == [timedelta(minutes=7)], rank
    assert ranks.run(groups_of_one, Case("mixtral", dp=4, ep=2, zero=3)) == [[]] * 4


def groups_of_one(rank, world_size, case):
    """Timeouts of the groups other than those of the axes."""
    config = case.config(ADAM)
    changes = {
        "model": config.model.model_copy(update={"moe_layer_freq": 7}),
        "parallel": config.parallel.model_copy(update={"distributed_timeout_minutes": 7.0}),
    }
    config = config.model_copy(update=changes)
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    timeouts, new_group = [], dist.new_group

    def recording(ranks, timeout, **options):
        assert ranks == [rank]
        timeouts.append(timeout)
        return new_group(ranks, timeout=timeout, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", recording)
        model = build_model(config, VOCAB_SIZE, mesh, groups, torch.device("cpu"))
    assert any("experts" in name for name in model.parameters) == (mesh.pp_rank == 0)
    return timeouts


def count_collectives(rank, world_size, case):
    """Collectives of two iterations."""
    model, optimizer = build(rank, world_size, case)
    seen = Counter()

    def counting(kind, function):
        def call(*arguments, **options):
            seen[kind] += 1
            return function(*arguments, **options)

        return call

    # Names since torch 2.13, and earlier names.
    gather, scatter = (
        ("all_gather_single", "reduce_scatter_single")
        if hasattr(dist, "all_gather_single")
        else ("all_gather_into_tensor", "reduce_scatter_tensor")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, gather, counting("gather", getattr(dist, gather)))
        patch.setattr(dist, scatter, counting("scatter", getattr(dist, scatter)))
        for iteration in range(2):
            iterate(case, model, optimizer, iteration)
    return dict(seen)


@pytest.fixture(scope="module")
def of_whole_weights(ranks):
    """Expected evaluations of a case without shards, for both stages."""
    return functools.cache(lambda case: ranks.run(evaluations, case, world_size=case.world_size))


@pytest.mark.parametrize("case", [Case("gpt2", dp=2, pp=2), Case(dp=2), Case("mixtral", dp=2, ep=2)], ids=str)
@pytest.mark.parametrize("zero", [2, 3])
def test_evaluation_sees_the_weights_as_they_are(ranks, of_whole_weights, case, zero):
    case = case.but(micro_batches=2)
    expected = of_whole_weights(case)
    found = ranks.run(evaluations, case.but(zero=zero), world_size=case.world_size)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def evaluations(rank, world_size, case):
    """Losses and logits at the start, after an iteration, and after loading weights.

    Each evaluation runs twice.
    """
    model, optimizer = build(rank, world_size, case)
    seen = []

    def look():
        for _ in range(2):
            seen.append(forward_only(model, case.batch(9)))
            logits = forward_logits(model, case.batch(9)[0].tokens)
            seen.append(torch.zeros(()) if logits is None else logits)

    look()
    for iteration in range(2):
        iterate(case, model, optimizer, iteration)
        look()
    with torch.no_grad():
        for shard in model.gradients.parameter_shards:
            shard.weight.mul_(1.5)
    model.gradients.weights_changed()
    model.gradients.wait_for_weights()
    look()
    iterate(case, model, optimizer, 2)
    look()
    return seen


def test_parameter_shards_stay_the_same_objects(ranks):
    ranks.run(keep_parameter_shards, Case("capacity", dp=4, ep=2, zero=3, micro_batches=1))


def keep_parameter_shards(rank, world_size, case):
    model, optimizer = build(rank, world_size, case)
    parameter_shards = list(model.gradients.parameter_shards)
    places = [(shard.weight.data_ptr(), shard.gradient.data_ptr()) for shard in parameter_shards]
    for iteration in range(2):
        forward_only(model, case.batch(9))
        iterate(case, model, optimizer, iteration)
    assert all(one is other for one, other in zip(parameter_shards, model.gradients.parameter_shards, strict=True))
    assert places == [(shard.weight.data_ptr(), shard.gradient.data_ptr()) for shard in parameter_shards]
    # Between iterations the modules hold these same shards.
    for shard in parameter_shards:
        assert model.parameters[shard.name]._local_tensor.data_ptr() == shard.weight.data_ptr()
    held = {id(parameter) for chunk in model.chunks for parameter in chunk.parameters()}
    assert held == {id(parameter) for parameter in model.parameters.values()}


def test_one_replica_needs_no_shards(ranks):
    assert ranks.run(store_of, Case(tp=2, zero=3), world_size=2) == ["GradientBuckets"] * 2


def store_of(rank, world_size, case):
    return type(build(rank, world_size, case)[0].gradients).__name__
