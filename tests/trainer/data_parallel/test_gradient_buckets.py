"""Main gradients equal autograd's gradients, and each is reduced exactly once."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.trainer.spawn import DEADLINE_S
from trainer.config.sections.parallel import ParallelConfig
from trainer.data_parallel.gradient_buckets import GradientBuckets
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups
from trainer.model.sharding import ParameterLayout


class FusedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, accumulator):
        ctx.save_for_backward(inputs, weight)
        ctx.accumulator = accumulator
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        inputs, weight = ctx.saved_tensors
        ctx.accumulator.add_outer(grad.contiguous(), inputs)
        return grad @ weight, None, None


class Linear(nn.Module):
    """A linear layer that passes its weight gradient to its accumulator, if set."""

    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight, self.bias, self.gradient_accumulator = weight, bias, None

    def forward(self, inputs):
        if self.gradient_accumulator is None:
            product = inputs @ self.weight.t()
        else:
            product = FusedProduct.apply(inputs, self.weight, self.gradient_accumulator)
        return product if self.bias is None else product + self.bias


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, table, accumulator):
        ctx.save_for_backward(tokens)
        ctx.accumulator = accumulator
        return table[tokens]

    @staticmethod
    def backward(ctx, grad):
        ctx.accumulator.add_rows(ctx.saved_tensors[0], grad)
        return None, None, None


class Embedding(nn.Module):
    """A table that passes its rows' gradient to its accumulator, if set."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.row_accumulator = weight, None

    def forward(self, tokens):
        if self.row_accumulator is None:
            return self.weight[tokens]
        return Lookup.apply(tokens, self.weight, self.row_accumulator)


class Toy(nn.Module):
    """Embedding, norm weight, linear with bias, and a tied head.

    One parameter is never used.
    """

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def parameter(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.embedding = Embedding(parameter(11, 6))
        self.scale = parameter(6)
        self.linear = Linear(parameter(6, 6), parameter(6))
        self.unused = parameter(3)
        self.head = Linear(self.embedding.weight)

    def forward(self, tokens):
        logits = self.head(self.linear(self.embedding(tokens) * self.scale))
        return nn.functional.cross_entropy(logits.float(), tokens.roll(1), reduction="sum")


def micro_batches(count, rank=0):
    return torch.randint(0, 11, (count, 9), generator=torch.Generator().manual_seed(17 + rank))


def build(model, groups=None, mesh=None, **parallel):
    mesh = mesh or ParallelMesh(tp=1, pp=1, dp=1, rank=0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = {names[id(parameter)]: parameter for parameter in model.parameters()}
    layouts = {
        name: ParameterLayout(
            name=name,
            global_shape=tuple(parameter.shape),
            tp_dim=None,
            partial_over_tp=name in ("scale", "linear.bias"),
            tied_over_stages=name == "embedding.weight" and mesh.pp > 1,
            is_matrix=True,
        )
        for name, parameter in parameters.items()
    }
    buckets = GradientBuckets(parameters, layouts, mesh, groups or ProcessGroups(), ParallelConfig(**parallel))
    buckets.connect([model])
    return buckets


def run_iteration(model, buckets, batches):
    buckets.begin(len(batches))
    for number, tokens in enumerate(batches):
        if number == len(batches) - 1:
            buckets.expect_last_backward(0)
        model(tokens).backward()
    buckets.finish()
    return {name: buckets.main_grad(name).clone() for name, _ in model.named_parameters()}


def plain_gradients(batches, dtype=torch.float32):
    model = Toy(dtype)
    for tokens in batches:
        model(tokens).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("unfused", [False, True])
def test_sums_over_micro_batches_as_autograd_does_and_starts_anew_each_iteration(unfused):
    model = Toy()
    buckets = build(model, no_gradient_accumulation_fusion=unfused)
    assert (model.linear.gradient_accumulator is None) == unfused and model.embedding.row_accumulator is not None
    run_iteration(model, buckets, micro_batches(2, rank=9) * 0)
    found = run_iteration(model, buckets, micro_batches(3))
    for name, expected in plain_gradients(micro_batches(3)).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not found["unused"].any()


def test_main_gradients_of_16_bit_parameters_are_32_bit():
    model = Toy(torch.bfloat16)
    found = run_iteration(model, build(model), micro_batches(3))
    for name, expected in plain_gradients(micro_batches(3)).items():
        assert found[name].dtype == torch.float32
        assert (found[name] - expected).abs().max() <= 0.05 * expected.abs().max()


def test_buffer_is_contiguous_aligned_and_in_reverse_order_of_use():
    model = Toy()
    buckets = build(model)
    offsets = {name: buckets.main_grad(name).storage_offset() for name, _ in model.named_parameters()}
    assert all(offset % 64 == 0 for offset in offsets.values())
    assert offsets["linear.weight"] < offsets["embedding.weight"]
    assert buckets.buffer.numel() < sum(p.numel() + 64 for p in model.parameters())


def reduce_over_replicas(rank, world_size, overlap, bucket_size):
    mesh = ParallelMesh(tp=1, pp=1, dp=world_size, rank=rank)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    model = Toy()
    buckets = build(model, groups, mesh, overlap_grad_reduce=overlap, ddp_bucket_size=bucket_size)
    log = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, **options: log.append(tensor.numel()) or all_reduce(tensor, **options)
    add_rows = model.embedding.row_accumulator.add_rows
    model.embedding.row_accumulator.add_rows = lambda *rows: log.append("embedding") or add_rows(*rows)
    try:
        found = [run_iteration(model, buckets, micro_batches(3, rank)) for _ in range(2)]
    finally:
        dist.all_reduce = all_reduce
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    return {name: gradient.numpy() for name, gradient in found[0].items()}, log, buckets.buffer.numel()


@pytest.mark.parametrize(("overlap", "bucket_size"), [(True, 1), (True, 40), (True, None), (False, None), (False, 1)])
@pytest.mark.parametrize("dp", [2, 4])
def test_every_gradient_is_reduced_once_and_overlapped_with_backward(ranks, dp, overlap, bucket_size):
    results = ranks.run(reduce_over_replicas, overlap, bucket_size, world_size=dp)
    expected = plain_gradients(torch.cat([micro_batches(3, rank) for rank in range(dp)]))
    for found, log, total in results:
        for name, gradient in expected.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), gradient, rtol=1e-5, atol=1e-5)
            assert (found[name] == results[0][0][name]).all()
        sizes = [entry for entry in log if entry != "embedding"]
        assert sum(sizes) == 2 * total
        assert len(sizes) == {1: 2 * 5, None: 2}.get(bucket_size, len(sizes))
        if overlap and bucket_size:
            # Buckets are sent before backward reaches the embedding, in the last micro-batch and not earlier.
            assert log[:3] == ["embedding", "embedding", sizes[0]]
            assert log.index("embedding", 2) > 2
        else:
            assert log[:4] == ["embedding"] * 3 + [sizes[0]]
            assert log.index("embedding", 3) == 3 + len(sizes) // 2


def sum_shared(rank, _world_size, tp, pp):
    mesh = ParallelMesh(tp=tp, pp=pp, dp=1, rank=rank)
    model = Toy()
    buckets = build(model, build_process_groups(mesh, timedelta(seconds=DEADLINE_S)), mesh)
    found = run_iteration(model, buckets, micro_batches(1, rank))
    return {name: gradient.numpy() for name, gradient in found.items()}


@pytest.mark.parametrize(("tp", "pp", "summed"), [(2, 1, ("scale", "linear.bias")), (1, 2, ("embedding.weight",))])
def test_shared_parameters_are_summed_and_no_others(ranks, tp, pp, summed):
    alone = [plain_gradients(micro_batches(1, rank)) for rank in range(2)]
    for rank, found in enumerate(ranks.run(sum_shared, tp, pp, world_size=2)):
        for name, gradient in found.items():
            expected = alone[0][name] + alone[1][name] if name in summed else alone[rank][name]
            torch.testing.assert_close(torch.from_numpy(gradient), expected, rtol=1e-5, atol=1e-5)


class Experts(nn.Module):
    """Expert weights [E, out, in] with a gradient accumulator."""

    def __init__(self, *shape, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.gradient_accumulator = None


@pytest.mark.parametrize("shape", [(4, 8, 16), (4, 2, 4, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_device", [False, True])
def test_grouped_products_go_to_their_experts(shape, dtype, on_device):
    model = Experts(*shape, dtype=dtype)
    buckets = build(model)
    generator = torch.Generator().manual_seed(3)
    # Experts 1 and 3 have no tokens in the first micro-batch; only expert 1 has any in the second.
    batches = [[0, 4, 4, 9, 9], [0, 0, 7, 7, 7]]
    for _ in range(2):  # in the second iteration everything that the first one left must be gone
        expected = torch.zeros(4, 8, 16)
        buckets.begin(len(batches))
        for offsets in batches:
            grad = torch.randn(offsets[-1], 8, generator=generator).to(dtype)
            inputs = torch.randn(offsets[-1], 16, generator=generator).to(dtype)
            given = torch.tensor(offsets, dtype=torch.int32) if on_device else offsets
            model.gradient_accumulator.add_grouped_outer(grad, inputs, given)
            for expert in range(4):
                rows = slice(offsets[expert], offsets[expert + 1])
                expected[expert] += grad[rows].float().t() @ inputs[rows].float()
        buckets.finish()
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        found = buckets.main_grad("weight")
        assert found.shape == shape
        torch.testing.assert_close(found.view(4, 8, 16), expected, rtol=tolerance, atol=tolerance)
        assert not found[3].any()


@pytest.mark.parametrize("offsets", [[0, 0, 0], torch.zeros(3, dtype=torch.int32)], ids=["host", "device"])
def test_grouped_products_of_no_tokens_are_a_contribution(offsets):
    model = Experts(2, 3, 4)
    buckets = build(model)
    buckets.buffer.fill_(7.0)
    buckets.begin(1)
    model.gradient_accumulator.add_grouped_outer(torch.zeros(0, 3), torch.zeros(0, 4), offsets)
    assert not buckets.main_grad("weight").any()


@pytest.mark.gpu
def test_fused_16_bit_accumulation_on_a_gpu():
    weight = nn.Parameter(torch.zeros(16, 32, dtype=torch.bfloat16, device="cuda"))
    model = Linear(weight)
    buckets = build(model)
    buckets.begin(2)
    grad = torch.randn(64, 16, device="cuda").bfloat16()
    inputs = torch.randn(64, 32, device="cuda").bfloat16()
    for _ in range(2):
        model.gradient_accumulator.add_outer(grad, inputs)
    buckets.finish()
    torch.testing.assert_close(buckets.main_grad("weight"), 2 * grad.float().t() @ inputs.float(), rtol=1e-4, atol=1e-3)
