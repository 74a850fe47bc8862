"""Tensor-parallel layers on real ranks against the whole layer, with and without sequence parallelism."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config.sections.model import ModelConfig
from trainer.data_parallel.parameter_shards import ParameterShard
from trainer.data_parallel.shared_gradients import sum_shared_gradients
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.model.attention.latent_attention import LatentAttention
from trainer.model.attention.self_attention import SelfAttention
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.dropout import hidden_dropout
from trainer.model.rotary import RotaryTable
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.collectives import PendingCollective, TensorParallel
from trainer.model.tensor_parallel.embedding import VocabParallelEmbedding
from trainer.model.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from trainer.ops.dispatch.registry import Kernels

LENGTH, BATCH, HIDDEN, INNER, VOCAB = 8, 3, 6, 8, 12
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def draw(name, *shape):
    seed = sum(map(ord, name))
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def axis(rank, world_size, sequence_parallel):
    return TensorParallel(world_size, rank, dist.group.WORLD if world_size > 1 else None, sequence_parallel)


class OuterProducts:
    """A gradient accumulator that computes its products at once."""

    def __init__(self):
        self.total = 0.0

    def add_outer(self, grad_output, inputs):
        self.total = self.total + grad_output.T @ inputs


def whole_pair():
    inputs = draw("inputs", LENGTH, BATCH, HIDDEN).requires_grad_()
    weights = [draw("up", INNER, HIDDEN), draw("down", HIDDEN, INNER), draw("up-bias", INNER), draw("bias", HIDDEN)]
    up, down, up_bias, bias = (weight.requires_grad_() for weight in weights)
    outputs = F.linear(torch.tanh(F.linear(inputs, up, up_bias)), down, bias)
    outputs.backward(draw("gradient", LENGTH, BATCH, HIDDEN))
    return outputs.detach(), inputs.grad, up.grad, down.grad, up_bias.grad, bias.grad


def divided_pair(rank, world_size, sequence_parallel, with_accumulators):
    tp = axis(rank, world_size, sequence_parallel)
    share = slice(rank * INNER // world_size, (rank + 1) * INNER // world_size)
    up = ColumnParallelLinear(
        nn.Parameter(draw("up", INNER, HIDDEN)[share].clone()), nn.Parameter(draw("up-bias", INNER)[share].clone()), tp
    )
    down = RowParallelLinear(
        nn.Parameter(draw("down", HIDDEN, INNER)[:, share].clone()), nn.Parameter(draw("bias", HIDDEN)), tp
    )
    if with_accumulators:
        up.gradient_accumulator, down.gradient_accumulator = OuterProducts(), OuterProducts()
    inputs = tp.sequence_shard(draw("inputs", LENGTH, BATCH, HIDDEN)).clone().requires_grad_()
    outputs = down(torch.tanh(up(inputs)))
    outputs.backward(tp.sequence_shard(draw("gradient", LENGTH, BATCH, HIDDEN)))
    if with_accumulators:
        assert up.weight.grad is None
        assert down.weight.grad is None
    up_grad, down_grad = (
        layer.gradient_accumulator.total if with_accumulators else layer.weight.grad for layer in (up, down)
    )
    return outputs.detach(), inputs.grad, up_grad, down_grad, up.bias.grad, down.bias.grad


@pytest.mark.parametrize("with_accumulators", [False, True], ids=["autograd", "accumulators"])
@pytest.mark.parametrize(("world_size", "sequence_parallel"), LAYOUTS)
def test_column_and_row_pair(ranks, world_size, sequence_parallel, with_accumulators):
    outputs, input_grad, up_grad, down_grad, up_bias_grad, bias_grad = whole_pair()
    parts = ranks.run(divided_pair, sequence_parallel, with_accumulators, world_size=world_size)
    found = list(zip(*parts, strict=True))
    for expected, shards in ((outputs, found[0]), (input_grad, found[1])):
        if sequence_parallel:
            torch.testing.assert_close(torch.cat(shards, 0), expected)
        else:
            for shard in shards:
                torch.testing.assert_close(shard, expected)
    torch.testing.assert_close(torch.cat(found[2], 0), up_grad)
    torch.testing.assert_close(torch.cat(found[3], 1), down_grad)
    torch.testing.assert_close(torch.cat(found[4], 0), up_bias_grad)
    # The row-parallel bias is added to this rank's part of the sequence only: its gradient is summed over tp later.
    total = sum(found[5]) if sequence_parallel else found[5][0]
    torch.testing.assert_close(total, bias_grad)


class CallOrder(TorchDispatchMode):
    """Products and collectives in the order of issue."""

    NAMES = {
        "aten.mm": "product",
        "c10d.allreduce": "sum",
        "c10d._reduce_scatter_base": "sum",
        "c10d._allgather_base": "gather",
    }

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.calls += [short for name, short in self.NAMES.items() if str(function).startswith(name)]
        return function(*arguments, **(keywords or {}))


class NamedProducts(OuterProducts):
    """A gradient accumulator that logs its calls."""

    def __init__(self, calls):
        super().__init__()
        self._calls = calls

    def add_outer(self, *_):
        self._calls.append("weight gradient")


def order_of_issue(rank, world_size, sequence_parallel):
    """Operations of forward and backward through a column-parallel layer, in order, including waits."""
    tp = axis(rank, world_size, sequence_parallel)
    layer = ColumnParallelLinear(nn.Parameter(draw("up", INNER // 2, HIDDEN)), None, tp)
    inputs = tp.sequence_shard(draw("inputs", LENGTH, BATCH, HIDDEN)).clone().requires_grad_()
    result = PendingCollective.result

    def waited(pending):
        if pending._work is not None:
            order.calls.append("wait")
        return result(pending)

    with CallOrder() as order, mock.patch.object(PendingCollective, "result", waited):
        layer.gradient_accumulator = NamedProducts(order.calls)
        outputs = layer(inputs)
        order.calls.append("backward")
        outputs.sum().backward()
    return order.calls


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        (False, "product, backward, product, sum, weight gradient, wait"),
        (True, "gather, wait, product, backward, gather, product, sum, wait, weight gradient, wait"),
    ],
)
def test_collectives_of_backward_overlap_with_products(ranks, sequence_parallel, expected):
    """The gather and the sum of backward overlap with matrix products.

    The gather overlaps with the input gradient's product, the sum with the other product.
    """
    for calls in ranks.run(order_of_issue, sequence_parallel, world_size=2):
        assert ", ".join(calls) == expected


def divided_lookup(rank, world_size, sequence_parallel):
    tp = axis(rank, world_size, sequence_parallel)
    rows = VOCAB // world_size
    layer = VocabParallelEmbedding(nn.Parameter(draw("table", VOCAB, HIDDEN)[rank * rows : (rank + 1) * rows]), tp)
    found = layer(tokens())
    found.backward(tp.sequence_shard(draw("gradient", LENGTH, BATCH, HIDDEN)))
    return found.detach(), layer.weight.grad


def tokens():
    return torch.randint(0, VOCAB, (LENGTH, BATCH), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("world_size", "sequence_parallel"), LAYOUTS)
def test_embedding(ranks, world_size, sequence_parallel):
    table = draw("table", VOCAB, HIDDEN).requires_grad_()
    expected = table[tokens()]
    expected.backward(draw("gradient", LENGTH, BATCH, HIDDEN))
    outputs, gradients = zip(*ranks.run(divided_lookup, sequence_parallel, world_size=world_size), strict=True)
    if sequence_parallel:
        assert torch.equal(torch.cat(outputs, 0), expected)
    else:
        assert all(torch.equal(output, expected) for output in outputs)
    torch.testing.assert_close(torch.cat(gradients, 0), table.grad)


def foreign_token(rank, world_size, token):
    layer = VocabParallelEmbedding(nn.Parameter(torch.ones(VOCAB // world_size, HIDDEN)), axis(rank, world_size, False))
    with pytest.raises(IndexError):
        layer(torch.tensor([[0, token]]))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("token", [-1, VOCAB, 10 * VOCAB])
def test_a_token_beyond_the_table_is_refused_on_every_rank(ranks, world_size, token):
    ranks.run(foreign_token, token, world_size=world_size)


def divided_dropout(rank, world_size, sequence_parallel):
    tp = axis(rank, world_size, sequence_parallel)
    hidden = tp.sequence_shard(draw("inputs", LENGTH, BATCH, HIDDEN))
    randomness = StepRandomness(1, 2).micro_batch(3)
    return hidden_dropout(hidden, 0.5, randomness, "mlp_output", ParallelAxes(tp=tp), Kernels(), layer=4)


@pytest.mark.parametrize("world_size", [2, 4])
def test_dropout_of_a_part_of_the_sequence_is_that_of_the_whole(ranks, world_size):
    [expected] = ranks.run(divided_dropout, False, world_size=1)
    assert torch.equal(torch.cat(ranks.run(divided_dropout, True, world_size=world_size), 0), expected)
    assert torch.equal(ranks.run(divided_dropout, False, world_size=world_size)[1], expected)


def odd_sequence(rank, world_size):
    tp = axis(rank, world_size, True)
    layer = VocabParallelEmbedding(nn.Parameter(draw("table", VOCAB // 2, HIDDEN)), tp)
    with pytest.raises(ValueError, match=f"tensor-parallel rank {rank}: a sequence of 7 cannot be divided over 2"):
        layer(tokens()[:7])


def test_a_sequence_that_tp_does_not_divide_is_refused(ranks):
    ranks.run(odd_sequence, world_size=2)


ATTENTION = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "kv_channels": 4,
    "init_method_std": 0.3,
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "hidden_dropout": 0.0,
}


def attention(rank, world_size, options, sequence_parallel):
    """Output, input gradient, and each parameter's gradient with its shard boxes, of one self-attention."""
    model = ModelConfig(**{**ATTENTION, **options})
    mesh = ParallelMesh(tp=world_size, pp=1, dp=1, rank=rank, kv_copies=max(1, world_size // model.query_groups))
    groups = build_process_groups(mesh, timedelta(seconds=60))
    axes = ParallelAxes(tp=TensorParallel.build(mesh, groups, sequence_parallel))
    builder = ParameterBuilder(3, mesh, sequence_parallel, torch.float64, torch.device("cpu"))
    kind = LatentAttention if model.multi_latent_attention else SelfAttention
    layer = kind(model, 1, builder, axes)
    with torch.no_grad():
        for name, layout in builder.layouts.items():
            if not layout.decay:
                builder.parameters[name] += layout.shard(draw(name, *layout.global_shape), mesh)
    rotary = RotaryTable.of(model, LENGTH, torch.float64, torch.device("cpu"))
    forward_pass = ForwardPass(rotary, randomness=StepRandomness(1, 2).micro_batch(3))
    inputs = axes.tp.sequence_shard(draw("inputs", LENGTH, BATCH, model.hidden_size)).clone().requires_grad_()
    output = layer(inputs, forward_pass)
    output.backward(axes.tp.sequence_shard(draw("gradient", LENGTH, BATCH, model.hidden_size)))
    parameter_shards = [
        ParameterShard(name, 0, parameter.detach().view(-1), parameter.grad.view(-1))
        for name, parameter in builder.parameters.items()
    ]
    sum_shared_gradients(parameter_shards, builder.layouts, mesh, groups)
    parts = [
        (shard.name, builder.layouts[shard.name].boxes(mesh), shard.weight, shard.gradient)
        for shard in parameter_shards
    ]
    return output.detach(), inputs.grad, parts


def put_together(reports, shapes, column):
    """Whole tensors by name; copies must be equal on all ranks."""
    wholes = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items()}
    owners = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for _, _, parts in reports:
        for name, boxes, *tensors in parts:
            for box in boxes:
                at = tuple(slice(first, first + extent) for first, extent in zip(box.offset, box.shape, strict=True))
                found, whole = tensors[column][box.start : box.stop].view(box.shape), wholes[name][at]
                assert torch.equal(whole.isnan() | (whole == found), torch.ones_like(whole, dtype=torch.bool)), name
                wholes[name][at] = found
                owners[name][at] += box.is_owned
    assert all((count == 1).all() for count in owners.values())
    return wholes


def check_attention(ranks, options, world_size, sequence_parallel):
    """Require results, gradients and initial values of divided attention to be those of one rank."""
    [whole] = ranks.run(attention, options, False, world_size=1)
    reports = ranks.run(attention, options, sequence_parallel, world_size=world_size)
    for which in (0, 1):
        parts = [report[which] for report in reports]
        found = torch.cat(parts, 0) if sequence_parallel else parts[-1]
        torch.testing.assert_close(found, whole[which])
    shapes = {name: boxes[0].shape for name, boxes, *_ in whole[2]}
    serial, divided = (put_together(report, shapes, 0) for report in ([whole], reports))
    for name, weight in serial.items():
        assert torch.equal(divided[name], weight), f"initial {name}"
    serial, divided = (put_together(report, shapes, 1) for report in ([whole], reports))
    for name, gradient in serial.items():
        torch.testing.assert_close(divided[name], gradient, msg=name)


RANKS_AND_GROUPS = [(4, 2), (4, 1), (2, 1), (4, 4), (2, 4)]


@pytest.mark.parametrize(("bias", "dropout"), [("none", 0.0), ("qkv", 0.3), ("all", 0.3)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("world_size", "groups"), RANKS_AND_GROUPS)
def test_attention_with_more_ranks_than_query_groups(ranks, world_size, groups, sequence_parallel, bias, dropout):
    options = {
        "num_query_groups": groups,
        "disable_bias_linear": bias != "all",
        "add_qkv_bias": bias == "qkv",
        "attention_dropout": dropout,
    }
    check_attention(ranks, options, world_size, sequence_parallel)


@pytest.mark.parametrize("scope", ["head", "all"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("world_size", "groups"), RANKS_AND_GROUPS)
def test_gradients_of_query_and_key_norms_are_summed_over_tp(ranks, world_size, groups, sequence_parallel, scope):
    """Each rank sees only its own heads; trainers that forget this sum train on, a little worse."""
    options = {"num_query_groups": groups, "qk_layernorm": True, "qk_layernorm_scope": scope}
    check_attention(ranks, {**options, "normalization": "RMSNorm"}, world_size, sequence_parallel)
    if scope == "head":
        check_attention(ranks, {**options, "normalization": "LayerNorm"}, world_size, sequence_parallel)


LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 6,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 5,
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("q_lora_rank", [None, 7])
@pytest.mark.parametrize(("world_size", "sequence_parallel"), [(2, False), (4, False), (4, True)])
def test_latent_attention_divides_heads_and_copies_latents(ranks, world_size, sequence_parallel, q_lora_rank, dropout):
    options = {**LATENT, "q_lora_rank": q_lora_rank, "attention_dropout": dropout}
    check_attention(ranks, options, world_size, sequence_parallel)


def test_ranks_that_neither_share_nor_divide_the_groups_are_refused():
    model = ModelConfig(**{**ATTENTION, "num_attention_heads": 12, "hidden_size": 24}, num_query_groups=2)
    builder = ParameterBuilder(1, ParallelMesh(3, 1, 1, 0), False, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="12 heads in 2 query groups cannot be divided over 3"):
        SelfAttention(model, 0, builder, ParallelAxes(tp=TensorParallel(3, 0)))
