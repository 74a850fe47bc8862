"""ZeRO-1 on real ranks: bitwise equal results, waits in time, divided state."""

import itertools
import math
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.trainer.spawn import DEADLINE_S, Ranks
from trainer.data.samples.micro_batch import MicroBatch
from trainer.data_parallel import gradient_buckets, sharded_buckets
from trainer.data_parallel.bucket_plan import plan_buckets
from trainer.data_parallel.sharded_buckets import ShardedBuckets
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.model.sharding import PackedHeads, ParameterLayout
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward, forward_only
from trainer.planning.build_config import build_config

# Widths that no number of ranks divides: vocabulary 37, ffn 40, odd vectors of three layers.
GPT2 = {"num_attention_heads": 4, "ffn_hidden_size": 40, "hidden_dropout": 0.1, "attention_dropout": 0.0}
LLAMA = {
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 40,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
EXPERTS = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 12}
SGD = {"optimizer": "sgd", "lr": 0.3, "weight_decay": 0.1, "clip_grad": 0.0}
ADAM = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0}
VOCAB_SIZE = 37


def configure(model, optimizer, training=None, **parallel):
    return build_config(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 24,
                "make_vocab_size_divisible_by": 1,
                "init_method_std": 0.1,
                **model,
            },
            "parallel": {"ddp_bucket_size": 2000, **parallel},
            "training": {
                "train_iters": 10,
                "seq_length": 8,
                "global_batch_size": 8,
                "device": "cpu",
                "initial_loss_scale": 2.0**10,
                "hysteresis": 1,
                **(training or {}),
            },
            "optimizer": optimizer,
            "data": {"mock_data": True},
        }
    )


def batch(iteration, mesh):
    generator = torch.Generator().manual_seed(50 + iteration)
    windows = torch.randint(0, VOCAB_SIZE, (8, 1, 9), generator=generator)
    whole = [MicroBatch(w[:, :-1].contiguous(), w[:, 1:].contiguous(), None, index) for index, w in enumerate(windows)]
    return whole[mesh.dp_rank :: mesh.dp]


def start(config, rank, world_size):
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    model = build_model(config, VOCAB_SIZE, mesh, groups, torch.device("cpu"))
    return model, MixedPrecisionOptimizer(config, model)


def step(config, model, optimizer, iteration):
    loss = forward_backward(
        model,
        batch(iteration, model.mesh),
        valid_tokens=64,
        loss_scale=optimizer.loss_scaler.scale,
        randomness=StepRandomness(3, iteration),
    )
    return float(loss), optimizer.step(config.optimizer.lr)


def bits(tensor):
    return tensor.detach().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy().copy()


def train(rank, world_size, config, iterations=3):
    """Losses, norms, whole weights bit by bit, and this rank's shards."""
    model, optimizer = start(config, rank, world_size)
    outcomes = [step(config, model, optimizer, iteration) for iteration in range(iterations)]
    model.gradients.wait_for_weights()
    weights = {name: bits(parameter) for name, parameter in model.parameters.items()}
    ranges = [(shard.name, shard.start, shard.stop) for shard in model.gradients.parameter_shards]
    assert model.gradients.is_sharded == (config.parallel.zero_stage == 1)
    return [loss for loss, _ in outcomes], [outcome.grad_norm for _, outcome in outcomes], weights, ranges


@pytest.fixture(scope="module")
def unsharded(ranks):
    """Reports of a run without shards; each is made once."""
    made = {}

    def reports(config, world_size=4):
        key = config.model_dump_json(), world_size
        made[key] = made.get(key) or ranks.run(train, config, world_size=world_size)
        return made[key]

    return reports


def assert_same(ranks, unsharded, world_size, build):
    plain = unsharded(build(), world_size)
    sharded = ranks.run(train, build(use_distributed_optimizer=True), world_size=world_size)
    for one, other in zip(plain, sharded, strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], rel=1e-6)
        for name in one[2]:
            assert (one[2][name] == other[2][name]).all(), name
    return sharded


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("dp", [2, 4])
def test_bits_are_those_of_unsharded_training(ranks, unsharded, dp, optimizer, precision):
    assert_same(ranks, unsharded, dp, partial(configure, GPT2, optimizer, precision))


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (GPT2, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
        (GPT2, {"overlap_param_gather": False}),
        (GPT2, {"ddp_bucket_size": 1}),
        (GPT2, {"ddp_bucket_size": None}),
        # A tied table on two ranks; norms and biases that are summed over tp.
        (GPT2, {"pipeline_model_parallel_size": 2}),
        (GPT2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (LLAMA, {"tensor_model_parallel_size": 2}),
        (LLAMA, {"pipeline_model_parallel_size": 2}),
    ],
    ids=str,
)
def test_bits_are_those_of_unsharded_training_in_other_layouts(ranks, unsharded, model, parallel):
    if parallel.get("tensor_model_parallel_size"):
        model = {**model, "make_vocab_size_divisible_by": 2}
    assert_same(ranks, unsharded, 4, partial(configure, model, ADAM, **parallel))


def test_bits_of_offloaded_shards_are_the_same(ranks, unsharded):
    offloaded = {**ADAM, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.6}
    plain = unsharded(configure(GPT2, ADAM, {"bf16": True}))
    sharded = ranks.run(train, configure(GPT2, offloaded, {"bf16": True}, use_distributed_optimizer=True))
    assert all((plain[0][2][name] == weights).all() for report in sharded for name, weights in report[2].items())


def test_clipping_sees_the_norm_of_the_whole_gradient(ranks):
    build = partial(configure, GPT2, {**SGD, "clip_grad": 0.1})
    plain = ranks.run(train, build())
    sharded = ranks.run(train, build(use_distributed_optimizer=True))
    assert len({tuple(norms) for _, norms, _, _ in sharded}) == 1
    assert sharded[0][1] == pytest.approx(plain[0][1], rel=1e-6)
    for name, weights in plain[0][2].items():
        found = torch.from_numpy(sharded[0][2][name]).view(torch.float32)
        torch.testing.assert_close(found, torch.from_numpy(weights).view(torch.float32), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dp", [2, 3, 5, 64])
def test_shards_cover_every_element_once_and_states_are_divided(dp):
    config = configure(GPT2, ADAM, {"bf16": True, "global_batch_size": dp}, use_distributed_optimizer=True)
    counts, elements, total = {}, [], 0
    for rank in range(dp):
        mesh = ParallelMesh.build(config, rank, dp)
        model = build_model(config, VOCAB_SIZE, mesh, ProcessGroups(), torch.device("cpu"))
        optimizer = MixedPrecisionOptimizer(config, model)
        for shard in model.gradients.parameter_shards:
            parameter = model.parameters[shard.name].detach().view(-1)
            counts.setdefault(shard.name, torch.zeros(parameter.numel()))[shard.start : shard.stop] += 1
            assert shard.weight.data_ptr() == parameter[shard.start :].data_ptr()
            assert shard.gradient.numel() == shard.weight.numel()
        tensors = optimizer.tensors()
        assert tensors.keys() == {"master", "exp_avg", "exp_avg_sq"}
        elements += [sum(tensor.numel() for tensor in named.values()) for named in tensors.values()]
        total = sum(parameter.numel() for parameter in model.parameters.values())
    assert counts.keys() == model.parameters.keys()
    assert all((count == 1).all() for count in counts.values())
    assert sum(elements) == 3 * total
    # Every bucket is padded to a multiple of 64 elements per rank.
    assert max(elements) <= total / dp + 64 * 20


def test_buckets_are_small_with_overlap_and_always_of_the_requested_size(monkeypatch):
    monkeypatch.setattr(gradient_buckets, "_default_bucket_size", lambda *_: 2000)

    def buckets(**parallel):
        config = configure(GPT2, ADAM, {"global_batch_size": 2}, **{"ddp_bucket_size": None, **parallel})
        model = build_model(config, VOCAB_SIZE, ParallelMesh.build(config, 0, 2), ProcessGroups(), torch.device("cpu"))
        return len(model.gradients._buckets)

    small, off = buckets(), {"overlap_grad_reduce": False}
    assert small > 2
    assert buckets(**off) == 1
    assert buckets(use_distributed_optimizer=True, **off) == small  # for the weights, which overlap with forward
    off["overlap_param_gather"] = False
    assert buckets(use_distributed_optimizer=True, **off) == 1
    for sharded in (False, True):
        assert buckets(use_distributed_optimizer=sharded, ddp_bucket_size=2000, **off) == small


def planned(mesh, with_layers=2):
    """Parameters of a stage: blocks with experts, and a tied table.

    The blocks have shared key and value heads; the table comes before or after them.
    """
    layouts = [ParameterLayout("embedding.word.weight", (40, 6), 0, False, True, True)]
    for layer in range(with_layers):
        packed = PackedHeads(groups=2, queries_per_group=4, head_dim=3)
        layouts.append(ParameterLayout(f"{layer}.norm", (6,), None, True, False, False))
        layouts.append(ParameterLayout(f"{layer}.qkv", (36, 6), 0, False, False, True, packed_heads=packed))
        layouts.append(ParameterLayout(f"{layer}.experts", (4, 10, 6), 1, False, False, True, is_expert=True))
    if not mesh.is_first_stage:
        layouts.append(layouts.pop(0))
    named = {layout.name: layout for layout in layouts}
    parameters = {name: torch.nn.Parameter(torch.zeros(named[name].local_shape(mesh))) for name in named}
    return plan_buckets(parameters, named, mesh, 100), parameters, named


def test_ranks_that_share_a_parameter_cut_it_alike():
    sizes = ParallelMesh(tp=4, pp=2, dp=4, ep=2, kv_copies=2, rank=0)
    ranges = {}
    for rank in range(sizes.world_size):
        mesh = sizes.at(rank)
        # The stages have different numbers of layers.
        plan, parameters, layouts = planned(mesh, with_layers=2 + mesh.pp_rank)
        assert [bucket.first_use for bucket in plan] == sorted((bucket.first_use for bucket in plan), reverse=True)
        assert {name for bucket in plan for name in bucket.spans} == parameters.keys()
        for bucket in plan:
            start, stop = bucket.shard(mesh.expert_dp_rank if bucket.is_expert else mesh.data_rank)
            assert start % 64 == stop % 64 == 0
            for name, (low, high) in bucket.spans.items():
                assert layouts[name].is_expert == bucket.is_expert
                ranges[rank, name] = (max(start, low) - low, min(stop, high) - low)
    for (rank, name), cut in ranges.items():
        mesh = sizes.at(rank)
        assert all(cut == ranges[other, name] for other in mesh.tp_ranks)
        if name == "embedding.word.weight":
            assert all(cut == ranges[other, name] for other in mesh.embedding_ranks)
        copies = mesh.expert_dp_ranks if name.endswith("experts") else mesh.dp_cp_ranks
        covered = sorted(ranges[other, name] for other in copies if ranges[other, name][0] < ranges[other, name][1])
        assert covered[0][0] == 0
        assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))
        assert covered[-1][1] == planned(mesh, 2 + mesh.pp_rank)[1][name].numel()


def overflow(rank, world_size, config):
    model, optimizer = start(config, rank, world_size)
    before = {name: bits(parameter) for name, parameter in model.parameters.items()}
    measure = optimizer._norm.measure
    for iteration in range(2):
        if iteration == 0 and rank == 1:
            # Poison one element, of which one rank alone has the sum.
            def poisoned():
                model.gradients.parameter_shards[-1].gradient[-1] = math.inf
                return measure()

            optimizer._norm.measure = poisoned
        else:
            optimizer._norm.measure = measure
        skipped = step(config, model, optimizer, iteration)[1].skipped
        model.gradients.wait_for_weights()
        same = all((before[name] == bits(parameter)).all() for name, parameter in model.parameters.items())
        assert skipped == same == (iteration == 0)
    return optimizer.loss_scaler.scale, optimizer.steps


def test_an_overflow_in_one_shard_skips_the_step_of_all(ranks):
    config = configure(GPT2, ADAM, {"fp16": True}, use_distributed_optimizer=True)
    assert ranks.run(overflow, config, world_size=4) == [(2.0**9, 1)] * 4


class Later:
    """A collective that takes place only when it is waited for."""

    def __init__(self, run):
        self._run = run

    def wait(self):
        self._run()


def train_with_late_gathers(rank, world_size, config, mutation):
    broadcast = dist.broadcast

    def later(tensor, **options):
        # Before the wait the received weights are unusable.
        if options["group_src"] != dist.get_rank(options["group"]):
            tensor.fill_(math.nan)
        return Later(partial(broadcast, tensor, **{**options, "async_op": False}))

    dist.broadcast = later
    if mutation == "no waiting in forward":
        sharded_buckets._wait_before_forward = lambda *_: None
    if mutation == "evaluate":
        model, optimizer = start(config, rank, world_size)
        step(config, model, optimizer, 0)
        before = float(forward_only(model, batch(1, model.mesh)))
        model.gradients.wait_for_weights()
        assert before == float(forward_only(model, batch(1, model.mesh)))
    try:
        return train(rank, world_size, config)
    finally:
        dist.broadcast = broadcast


FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}


@pytest.mark.parametrize(
    ("model", "training", "parallel"),
    [
        (GPT2, {}, {}),
        (GPT2, {}, {"ddp_bucket_size": 1}),
        (LLAMA, FULL_RECOMPUTE, {"ddp_bucket_size": 1}),
        (EXPERTS, {}, {"ddp_bucket_size": 1, "expert_model_parallel_size": 2}),
        (GPT2, {}, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}),
        (
            {**LLAMA, "num_layers": 4},
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
        ),
        (GPT2, {}, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"}),
        (GPT2, {}, {"context_parallel_size": 2}),
        (GPT2, {}, {"overlap_param_gather": False}),
    ],
    ids=str,
)
def test_every_use_of_a_weight_waits_for_it(ranks, unsharded, model, training, parallel):
    build = partial(configure, model, ADAM, training, **parallel)
    plain = unsharded(build())
    late = ranks.run(train_with_late_gathers, build(use_distributed_optimizer=True), "evaluate")
    for one, other in zip(plain, late, strict=True):
        assert one[0] == other[0]
        for name in one[2]:
            assert (one[2][name] == other[2][name]).all(), name


def test_a_stale_gather_is_found():
    config = configure(GPT2, ADAM, use_distributed_optimizer=True)
    with Ranks(2) as own:  # the test leaves these ranks broken
        reports = own.run(train_with_late_gathers, config, "no waiting in forward")
    for losses, norms, _, _ in reports:
        assert [math.isfinite(loss) for loss in losses] == [True, False, True]
        assert norms[1] is None


def reduced_early(rank, world_size, config):
    model, optimizer = start(config, rank, world_size)
    assert isinstance(model.gradients, ShardedBuckets)
    log = []
    all_reduce, broadcast = dist.all_reduce, dist.broadcast
    dist.all_reduce = lambda tensor, **o: log.append(("reduce", tensor.numel())) or all_reduce(tensor, **o)
    dist.broadcast = lambda tensor, **o: log.append(("gather", tensor.numel())) or broadcast(tensor, **o)
    last = list(model.chunks[0].children())[0]
    last.register_full_backward_hook(lambda *_: log.append(("embedding", 0)))
    try:
        step(config, model, optimizer, 0)
    finally:
        dist.all_reduce, dist.broadcast = all_reduce, broadcast
    return log, model.gradients.buffer.numel()


def test_one_sync_per_global_batch_overlapped_with_backward(ranks):
    for log, total in ranks.run(reduced_early, configure(LLAMA, ADAM, use_distributed_optimizer=True), world_size=2):
        assert sum(size for what, size in log if what == "gather") == total
        reduced = [size for what, size in log if what == "reduce"]
        assert sum(reduced) == total + 1  # and the norm
        # The first three of four micro-batches send none; buckets of the last are sent before its backward ends.
        places = [place for place, (what, _) in enumerate(log) if what == "embedding"]
        assert [what for what, _ in log[: places[-2] + 1]] == ["embedding"] * 3
        assert "reduce" in [what for what, _ in log[places[-2] : places[-1]]]
