"""Edge cases of experts: no tokens, all tokens, one token; dropped tokens; unequal all-to-alls."""

from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.trainer.model.moe_layers import HIDDEN, build_layer, config_of, draw
from tests.trainer.spawn import DEADLINE_S
from trainer.data_parallel.main_gradient import MainGradient
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups
from trainer.model.context import ExpertParallel, ForwardPass, ParallelAxes
from trainer.model.context_parallel.axis import ContextParallel
from trainer.model.moe.capacity import expert_capacity, kept_choices, within_capacity
from trainer.model.moe.dispatch import Dispatch, from_experts, to_experts
from trainer.model.moe.layer import MoE
from trainer.model.moe.losses import attach_loss, load_balancing_loss
from trainer.model.moe.router import Routing
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel import collectives
from trainer.model.tensor_parallel.collectives import TensorParallel, enter_parallel_region
from trainer.ops.activation import ACTIVATION
from trainer.ops.dispatch.registry import Kernels

SERIAL = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
SWIGLU = {"swiglu": True, "disable_bias_linear": True}
REFERENCE = Kernels()


def layer_of(model):
    return build_layer(config_of(model), SERIAL, ProcessGroups())


def apply_expert(layer, expert, rows):
    """One expert with SwiGLU by plain autograd."""
    gate, up = (rows @ matrix.T for matrix in layer.experts.fc1.weight[expert])
    return (gate * torch.sigmoid(gate) * up) @ layer.experts.fc2.weight[expert].T


def send_all_to(layer, expert):
    """Make the router choose ``expert`` first for every token.

    The others follow in turn.
    """
    with torch.no_grad():
        weight = torch.zeros_like(layer.router.weight)
        weight[:, 0] = -torch.arange(len(weight), dtype=weight.dtype)
        weight[expert, 0] = 5.0
        layer.router.weight.copy_(weight)


def tokens_with_one(length, batch):
    hidden = draw("tokens", length, batch, HIDDEN)
    hidden[..., 0] = 1.0
    return hidden.requires_grad_()


@pytest.mark.parametrize("shape", [(6, 2), (1, 1)], ids=["twelve-tokens", "one-token"])
@pytest.mark.parametrize("expert", [0, 3])
def test_all_tokens_to_one_expert(expert, shape):
    layer, builder = layer_of({**SWIGLU, "moe_router_topk": 1, "moe_router_pre_softmax": True})
    send_all_to(layer, expert)
    hidden = tokens_with_one(*shape)
    output = layer(hidden, ForwardPass())
    share = torch.softmax(hidden.detach() @ layer.router.weight.T, -1)[..., expert, None]
    torch.testing.assert_close(output, share * apply_expert(layer, expert, hidden))
    output.sum().backward()
    for name, parameter in builder.parameters.items():
        if "experts" in name:
            assert [bool(part.any()) for part in parameter.grad] == [e == expert for e in range(4)], name


def test_an_expert_without_tokens_contributes_nothing_once_per_micro_batch():
    layer, _ = layer_of({**SWIGLU, "moe_router_topk": 1, "moe_router_pre_softmax": True})
    send_all_to(layer, 2)
    filled = []
    accumulators = [MainGradient(torch.full(fc.weight.shape, torch.nan), lambda: filled.append(1)) for fc in fcs(layer)]
    layer.float()
    for fc, accumulator in zip(fcs(layer), accumulators, strict=True):
        fc.gradient_accumulator = accumulator
        accumulator.sources = 1
        accumulator.begin(2)
    for _ in range(2):
        assert not filled
        layer(tokens_with_one(3, 1).detach().float().requires_grad_(), ForwardPass()).sum().backward()
    assert len(filled) == 2
    for accumulator in accumulators:
        assert [bool(part.any()) for part in accumulator.main] == [False, False, True, False]


def fcs(layer):
    return layer.experts.fc1, layer.experts.fc2


def test_a_rank_without_rows_still_takes_part(ranks):
    outputs, gradients = zip(*ranks.run(all_rows_elsewhere, world_size=2), strict=True)
    assert all(output.any() for output in outputs)
    assert gradients[0].any()
    assert not gradients[1].any()


def all_rows_elsewhere(rank, world_size):
    mesh = ParallelMesh(tp=1, pp=1, dp=world_size, ep=world_size, rank=rank)
    groups = ProcessGroups(dp_cp=dist.group.WORLD, ep=dist.group.WORLD)
    model = {**SWIGLU, "moe_router_topk": 1, "moe_router_pre_softmax": True}
    layer, _ = build_layer(config_of(model, ep=world_size), mesh, groups)
    send_all_to(layer, 0)
    output = layer(tokens_with_one(4, 1), ForwardPass())
    output.sum().backward()
    return output.detach(), layer.experts.fc1.weight.grad


def test_all_experts_of_every_token_are_a_weighted_sum():
    layer, _ = layer_of({**SWIGLU, "moe_router_topk": 4})
    hidden = draw("tokens", 5, 2, HIDDEN)
    shares = torch.softmax(hidden @ layer.router.weight.T, -1)
    expected = sum(shares[..., expert, None] * apply_expert(layer, expert, hidden) for expert in range(4))
    torch.testing.assert_close(layer(hidden, ForwardPass()), expected)


def test_ties_go_to_the_lower_expert():
    layer, _ = layer_of({**SWIGLU, "moe_router_topk": 3})
    routing = layer.router(torch.zeros(2, HIDDEN, dtype=torch.float64))
    assert routing.experts.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert torch.equal(routing.weights, torch.full((2, 3), 1 / 3, dtype=torch.float64))


def test_scores_of_16_bit_tokens_are_32_bit():
    layer, _ = layer_of(SWIGLU)
    layer.to(torch.bfloat16)
    routing = layer.router(draw("tokens", 5, HIDDEN).to(torch.bfloat16))
    assert {routing.weights.dtype, routing.logits.dtype, routing.shares.dtype} == {torch.float32}
    assert layer(draw("tokens", 5, 1, HIDDEN).to(torch.bfloat16), ForwardPass()).dtype == torch.bfloat16


def slowly_within_capacity(experts, weights, capacity, policy):
    kept = torch.zeros_like(experts, dtype=torch.bool)
    places = [(token, place) for token in range(len(experts)) for place in range(experts.shape[1])]
    if policy == "probs":
        places.sort(key=lambda place: -float(weights[place]))
    load = {}
    for place in places:
        expert = int(experts[place])
        load[expert] = load.get(expert, 0) + 1
        kept[place] = load[expert] <= capacity
    return kept


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("capacity", [1, 3, 7, 100])
@pytest.mark.parametrize(("num_tokens", "num_experts", "topk"), [(1, 2, 2), (17, 4, 2), (40, 5, 3), (16, 1, 1)])
def test_exactly_the_right_choices_are_dropped(num_tokens, num_experts, topk, capacity, policy):
    scores = draw("scores", num_tokens, num_experts)
    # Includes equal weights, of which the earlier tokens are kept.
    weights, experts = ((scores * 2).round() / 2).sort(dim=1, descending=True, stable=True)
    experts, weights = experts[:, :topk], weights[:, :topk]
    kept = within_capacity(experts, weights, num_experts, capacity, policy)
    assert torch.equal(kept, slowly_within_capacity(experts, weights, capacity, policy))


def kept_on_ranks(rank, world_size, policy):
    """True if the choices that this rank keeps are those that the whole sequence would keep of its part."""
    cp = ContextParallel(world_size, rank, dist.group.WORLD)
    weights, experts = draw("scores", 8, 2, 4).sort(dim=2, descending=True)
    weights, experts = weights[..., :2].contiguous(), experts[..., :2].contiguous()
    own = kept_choices(cp.shard(experts, 0), cp.shard(weights, 0), 4, 0.6, policy, cp)
    whole = slowly_within_capacity(experts.flatten(0, 1), weights.flatten(0, 1), expert_capacity(32, 4, 0.6), policy)
    return torch.equal(own, cp.shard(whole.view_as(experts), 0))


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_parts_of_a_sequence_drop_what_the_whole_sequence_drops(ranks, world_size, policy):
    assert all(ranks.run(kept_on_ranks, policy, world_size=world_size))


def test_capacity_is_a_multiple_of_an_even_share_rounded_up():
    assert expert_capacity(num_choices=16, num_experts=4, factor=1.0) == 4
    assert expert_capacity(num_choices=17, num_experts=4, factor=1.0) == 5
    assert expert_capacity(num_choices=16, num_experts=4, factor=0.01) == 1


def test_the_load_balancing_loss_is_1_when_all_experts_are_alike():
    experts = torch.tensor([[0, 1], [2, 3]])
    even = torch.full((2, 4), 0.25)
    routing = Routing(experts, torch.full((2, 2), 0.5), torch.zeros(2, 4), even)
    assert float(load_balancing_loss(routing, 2, ContextParallel())) == 1.0
    one = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), torch.zeros(2, 4), torch.eye(4)[[0, 0]])
    assert float(load_balancing_loss(one, 2, ContextParallel())) == 4.0


def test_an_attached_loss_adds_its_gradient_and_nothing_else():
    carrier, other = torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor(5.0, requires_grad=True)
    attached = attach_loss(carrier, other.square(), 0.25)
    assert torch.equal(attached, carrier)
    (attached * torch.tensor([1.0, 10.0])).sum().backward()
    assert carrier.grad.tolist() == [1.0, 10.0]
    assert float(other.grad) == 0.25 * 2 * 5


def travel(rank, world_size, num_experts, has_grouped_kernel):
    """Send tokens that encode their origin to experts that encode their number, and back."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = 3 + 2 * rank
    experts = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(num_tokens)])
    kept = torch.rand(num_tokens, 2, generator=generator) < 0.7
    kept[:, 0] &= rank != 1  # a rank that drops much
    ep = ExpertParallel(world_size, rank, dist.group.WORLD)
    dispatch = Dispatch.plan(experts, kept, num_experts, ep, has_grouped_kernel=has_grouped_kernel)
    assert isinstance(dispatch.offsets, torch.Tensor) == has_grouped_kernel
    offsets = [int(number) for number in dispatch.offsets]
    tokens = (100.0 * rank + torch.arange(num_tokens, dtype=torch.float64))[:, None].requires_grad_()
    rows = to_experts(tokens, dispatch, Kernels())
    local = num_experts // world_size
    own = torch.cat(
        [
            torch.full((stop - first, 1), 1000.0 * (rank * local + expert), dtype=torch.float64)
            for expert, (first, stop) in enumerate(zip(offsets, offsets[1:], strict=False))
        ]
    )
    weights = (1.0 + torch.arange(num_tokens * 2, dtype=torch.float64).view(num_tokens, 2)).requires_grad_()
    combined = from_experts(rows + own, weights, dispatch, Kernels())
    combined.sum().backward()
    values = tokens.detach() + 1000.0 * experts
    assert torch.equal(combined.flatten(), (weights.detach() * values * kept).sum(1))
    assert torch.equal(weights.grad, values * kept)
    assert torch.equal(tokens.grad[:, 0], (weights.detach() * kept).sum(1))
    # Within an expert the rows are in the order of ranks and tokens, as on one rank.
    for first, stop in zip(offsets, offsets[1:], strict=False):
        flat_range = rows.detach()[first:stop, 0].tolist()
        assert flat_range == sorted(flat_range)
    return len(rows)


@pytest.mark.parametrize(("world_size", "num_experts", "grouped"), [(2, 4, False), (4, 4, True), (4, 8, True)])
def test_rows_are_sent_to_their_experts_and_back(ranks, world_size, num_experts, grouped):
    assert len(set(ranks.run(travel, num_experts, grouped, world_size=world_size))) > 1, (
        "the test needs unequal row counts"
    )


def test_a_rank_whose_choices_are_all_dropped():
    tokens = draw("tokens", 3, HIDDEN).requires_grad_()
    weights = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    dispatch = Dispatch.plan(torch.tensor([[0, 1]] * 3), torch.zeros(3, 2, dtype=torch.bool), 2, ExpertParallel())
    rows = to_experts(tokens, dispatch, Kernels())
    assert rows.shape == (0, HIDDEN)
    combined = from_experts(rows, weights, dispatch, Kernels())
    combined.sum().backward()
    assert not combined.any()
    assert not tokens.grad.any()
    assert not weights.grad.any()


def shared_input(rank, world_size, sequence_parallel):
    tp = TensorParallel(world_size, rank, dist.group.WORLD, sequence_parallel)
    inputs = tp.sequence_shard(draw("inputs", 4, 1, 3)).clone().requires_grad_()
    whole = enter_parallel_region(inputs, tp)
    assert torch.equal(whole, draw("inputs", 4, 1, 3))
    gradient = draw("gradient", 4, 1, 3)
    (whole * gradient * (rank + 1)).sum().backward()
    torch.testing.assert_close(inputs.grad, tp.sequence_shard(gradient) * sum(range(world_size + 1)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_a_shared_input_are_summed(ranks, sequence_parallel):
    ranks.run(shared_input, sequence_parallel, world_size=2)


def saved_shapes_and_gradients(recompute_activation, kernels=REFERENCE):
    model, saved = config_of(SWIGLU).model, []
    builder = ParameterBuilder(3, SERIAL, False, torch.float64, torch.device("cpu"), kernels)
    layer = MoE(model, builder, ParallelAxes(), recompute_activation)

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(draw("tokens", 6, 2, HIDDEN), ForwardPass())
    output.sum().backward()
    return saved, [parameter.grad for parameter in builder.parameters.values()]


def test_recomputed_activations_are_not_kept_and_give_the_same_bits():
    kept, expected = saved_shapes_and_gradients(recompute_activation=False)
    fewer, found = saved_shapes_and_gradients(recompute_activation=True)
    activated, before = (24, 24), (24, 48)  # two experts for each of twelve tokens, 24 channels
    assert (kept.count(activated), fewer.count(activated)) == (1, 0)
    assert (kept.count(before), fewer.count(before)) == (1, 1)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("recompute_activation", [False, True])
def test_outputs_of_experts_that_multiply_by_the_weights_are_not_kept(recompute_activation):
    # Like a kernel, a function other than the default.
    kernels = Kernels(activation=lambda *arguments: REFERENCE[ACTIVATION](*arguments))
    kept, expected = saved_shapes_and_gradients(recompute_activation)
    fewer, found = saved_shapes_and_gradients(recompute_activation, kernels)
    outputs = (24, HIDDEN)
    assert fewer.count(outputs) == kept.count(outputs) - 1
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def collectives_of_a_shared_expert(rank, world_size, sequence_parallel):
    """Names of the tp collectives in forward and in backward."""
    model = {"moe_shared_expert_intermediate_size": 8}
    config = config_of(model, tp=world_size, sequence_parallel=sequence_parallel)
    mesh = ParallelMesh(tp=world_size, pp=1, dp=1, rank=rank)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    layer, _ = build_layer(config, mesh, groups)
    tp, seen = ParallelAxes.build(config, mesh, groups).tp, []
    inputs = tp.sequence_shard(draw("inputs", 4, 2, HIDDEN)).clone().requires_grad_()
    places = [(collectives, "all_gather_single"), (collectives, "reduce_scatter_single"), (dist, "all_reduce")]
    with ExitStack() as stack:
        for owner, name in places:
            plain = getattr(owner, name)
            counting = lambda *a, name=name, plain=plain, **o: seen.append(name) or plain(*a, **o)  # noqa: E731
            stack.enter_context(mock.patch.object(owner, name, counting))
        output = layer(inputs, ForwardPass())
        forward = list(seen)
        output.backward(torch.ones_like(output))
    return forward, seen[len(forward) :]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_shared_expert_adds_no_collective(ranks, sequence_parallel):
    found = ranks.run(collectives_of_a_shared_expert, sequence_parallel, world_size=2)
    both = ["all_gather_single", "reduce_scatter_single"]
    assert found == [(both, both) if sequence_parallel else (["all_reduce"], ["all_reduce"])] * 2
