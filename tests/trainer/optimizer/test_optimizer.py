"""The optimizer step against plain PyTorch on the same gradients."""

import math

import pytest
import torch

from trainer.data_parallel.bucket_plan import plan_buckets
from trainer.data_parallel.parameter_shards import is_first_copy
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.model.sharding import PackedHeads, ParameterLayout
from trainer.optimizer.clipping import clip_divisor
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.planning.build_config import build_config

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "make_vocab_size_divisible_by": 8}


def build(optimizer=None, training=None, model=None):
    config = build_config(
        {
            "model": {**SIZES, **(model or {})},
            "training": {"train_iters": 10, "seq_length": 8, **(training or {})},
            "optimizer": {"lr": 1.0, "weight_decay": 0.1, "clip_grad": 0.0, **(optimizer or {})},
        }
    )
    model = build_model(config, 40, ParallelMesh(1, 1, 1, 0), ProcessGroups(), torch.device("cpu"))
    return model, MixedPrecisionOptimizer(config, model)


def set_gradients(model, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.parameters.items():
        model.gradients.main_grad(name).copy_(factor * torch.randn(parameter.shape, generator=generator))
    return {name: model.gradients.main_grad(name).clone() for name in model.parameters}


def reference(model, kind):
    """Plain copies of the weights and torch's own optimizer over them, decaying matrices only."""
    copies = {name: parameter.detach().float().clone().requires_grad_() for name, parameter in model.parameters.items()}
    groups = [
        {"params": [copy for copy in copies.values() if copy.dim() > 1], "weight_decay": 0.1},
        {"params": [copy for copy in copies.values() if copy.dim() == 1], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return copies, torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=False, foreach=False)
    return copies, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8, fused=False, foreach=False)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("offloaded", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("is_tied", [True, False])
def test_vocabulary_tables_step_at_the_decoupled_rate(kind, offloaded, is_tied):
    """Against torch with groups of their own rate; the position embeddings are not among them, as in Megatron-LM."""
    keys = {"optimizer": kind, "decoupled_lr": 0.5}
    if offloaded:
        keys |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": offloaded}
    model, optimizer = build(keys, model={"untie_embeddings_and_output_weights": not is_tied})
    copies, plain = reference(model, kind)
    tables = [copy for copy in copies.values() if len(copy) == 40]
    assert len(tables) == (1 if is_tied else 2)
    for group in list(plain.param_groups):
        own = [parameter for parameter in group["params"] if any(parameter is table for table in tables)]
        if own:
            group["params"] = [parameter for parameter in group["params"] if not any(parameter is one for one in own)]
            plain.add_param_group({"params": own, "weight_decay": group["weight_decay"], "own": True})
    for seed, (lr, decoupled_lr) in enumerate(((0.01, 0.5), (0.02, 0.002), (0.005, 0.1))):
        gradients = set_gradients(model, seed)
        for name, copy in copies.items():
            copy.grad = gradients[name]
        for group in plain.param_groups:
            group["lr"] = decoupled_lr if "own" in group else lr
        optimizer.set_decoupled_lr(decoupled_lr)
        optimizer.step(lr)
        plain.step()
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("offloaded", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("decoupled", [False, True])
def test_rates_and_epsilon_by_width(kind, offloaded, decoupled):
    """Against torch with a group for each rule of Yang et al. 2022, table 8: here the ratio of the widths is 4."""
    keys = {"optimizer": kind, "adam_eps": 0.5}
    if offloaded:
        keys |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": offloaded}
    if decoupled:
        keys["decoupled_lr"] = 0.5
    shape = {"untie_embeddings_and_output_weights": True, "num_experts": 2, "mup_base_hidden_size": 4}
    model, optimizer = build(keys, model=shape)
    copies, _ = reference(model, kind)
    tables = {"embedding.word.weight", "embedding.position.weight", "head.weight"}
    assert tables < copies.keys()
    groups = []
    for name, copy in copies.items():
        is_hidden = model.layouts[name].is_matrix and name not in tables
        factor = (0.25 if is_hidden else 1.0) if kind == "adam" else 1.0 if is_hidden else 4.0
        own = decoupled and name in ("embedding.word.weight", "head.weight")
        group = {"params": [copy], "factor": factor, "own": own}
        groups.append({**group, "weight_decay": 0.1 if model.layouts[name].decay else 0.0})
    if kind == "sgd":
        plain = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    else:
        plain = torch.optim.AdamW([{**group, "eps": 0.5 * group["factor"]} for group in groups], lr=0.01)
    for seed, lr in enumerate((0.01, 0.02, 0.005)):
        gradients = set_gradients(model, seed)
        for name, copy in copies.items():
            copy.grad = gradients[name]
        for group in plain.param_groups:
            group["lr"] = 0.5 if group["own"] else lr * group["factor"]
        optimizer.step(lr)
        plain.step()
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
def test_steps_equal_plain_pytorch(kind, clip_grad):
    model, optimizer = build({"optimizer": kind, "clip_grad": clip_grad})
    copies, plain = reference(model, kind)
    for seed in range(5):
        gradients = set_gradients(model, seed)
        for name, copy in copies.items():
            copy.grad = gradients[name]
        if clip_grad:
            norm = torch.nn.utils.clip_grad_norm_(copies.values(), clip_grad)
        else:
            norm = torch.nn.utils.get_total_norm([copy.grad for copy in copies.values()])
        outcome = optimizer.step(0.01)
        plain.step()
        assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert not outcome.skipped
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=2e-5, atol=2e-6)
    assert optimizer.steps == 5


def test_only_matrices_decay():
    model, optimizer = build()
    before = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
    for parameter in model.parameters.values():
        parameter.data.add_(1.0)
    model.gradients.buffer.zero_()
    optimizer.step(0.5)
    for name, parameter in model.parameters.items():
        factor = 1 - 0.5 * 0.1 if parameter.dim() > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), (before[name] + 1.0) * factor)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_skips_the_step(bad):
    model, optimizer = build()
    before = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
    set_gradients(model, 0)
    model.gradients.main_grad(list(model.parameters)[3]).view(-1)[-1] = bad
    outcome = optimizer.step(0.1)
    assert outcome.skipped
    assert outcome.grad_norm is None
    assert optimizer.steps == 0
    assert all(torch.equal(before[name], parameter) for name, parameter in model.parameters.items())


def test_fp16_unscales_and_backs_off():
    keys = {"fp16": True, "initial_loss_scale": 4096.0, "hysteresis": 1}
    model, optimizer = build({"clip_grad": 1.0}, keys)
    full, full_optimizer = build({"clip_grad": 1.0})
    for name, parameter in full.parameters.items():
        parameter.data.copy_(model.parameters[name])
    set_gradients(model, 1, factor=4096.0)
    set_gradients(full, 1)
    assert optimizer.step(0.01).grad_norm == pytest.approx(full_optimizer.step(0.01).grad_norm, rel=1e-6)
    for name, master in optimizer.tensors()["master"].items():
        torch.testing.assert_close(master, full.parameters[name].detach().view(-1), rtol=1e-6, atol=1e-6)
        assert torch.equal(model.parameters[name].view(-1), master.half())
    set_gradients(model, 2, factor=math.inf)
    assert optimizer.step(0.01).skipped
    assert optimizer.loss_scaler.scale == 2048.0


def test_16_bit_weights_keep_what_rounding_would_lose():
    model, optimizer = build({"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0}, {"bf16": True})
    name = next(iter(model.parameters))
    before = model.parameters[name].detach().view(-1).clone()
    for _ in range(50):
        model.gradients.buffer.fill_(1.0)
        optimizer.step(1e-5)
    moved = (before.float() - optimizer.tensors()["master"][name]).mean()
    assert float(moved) == pytest.approx(50e-5, rel=1e-3)
    assert "momentum_buffer" not in optimizer.tensors()


def test_norm_of_a_large_tensor_is_exact():
    # A single float32 pass over this many elements would be wrong in the third digit.
    model, optimizer = build(training={"seq_length": 200_000})
    gradients = set_gradients(model, 0)
    exact = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    assert optimizer.step(0.0).grad_norm == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "training"),
    [
        ({"clip_grad": 1.0}, {}),
        ({"clip_grad": 0.0}, {}),
        ({"clip_grad": 1.0, "optimizer": "sgd", "sgd_momentum": 0.9}, {}),
        ({"clip_grad": 1.0, "store_param_remainders": True, "exp_avg_dtype": "bf16"}, {"bf16": True}),
        ({"clip_grad": 1.0}, {"fp16": True, "initial_loss_scale": 4.0, "hysteresis": 1}),
    ],
    ids=str,
)
def test_a_step_that_the_host_does_not_wait_for_has_the_same_bits(keys, training):
    """The way of a GPU: divisor and decision are tensors. The second of the steps is skipped."""
    found = []
    for runs_ahead in (False, True):
        model, optimizer = build(keys, training)
        optimizer._runs_ahead = runs_ahead
        outcomes = []
        for seed, factor in ((0, 3.0), (1, math.inf), (2, 0.01), (3, 3.0)):
            set_gradients(model, seed, factor)
            launched = optimizer.launch(0.01)
            outcomes.append(optimizer.finish(launched, float(launched.norm)))
        assert [outcome.skipped for outcome in outcomes] == [False, True, False, False]
        assert optimizer.steps == 3
        state = {kind: {name: torch.clone(getattr(one, "joined", lambda one=one: one)()) for name, one in named.items()}
                 for kind, named in optimizer.tensors().items()}  # fmt: skip
        weights = {name: parameter.detach().clone() for name, parameter in model.parameters.items()}
        found.append((outcomes, optimizer.loss_scaler.scale, {**state, "weight": weights}))
    assert found[0][:2] == found[1][:2]
    for kind, named in found[0][2].items():
        assert all(torch.equal(one, found[1][2][kind][name]) for name, one in named.items()), kind


def test_clip_divisor():
    def divisor(norm, clip_grad):
        return float(clip_divisor(torch.tensor(norm, dtype=torch.float64), clip_grad))

    assert divisor(0.5, 1.0) == 1.0
    assert divisor(4.0, 1.0) == pytest.approx(4.0)
    assert divisor(4.0, 0.0) == 1.0
    assert all(math.isnan(divisor(norm, clip)) for norm in (math.nan, math.inf) for clip in (0.0, 1.0))


@pytest.mark.parametrize(
    ("tp_dim", "tied", "rank", "counted"),
    [(0, False, 3, True), (None, False, 0, True), (None, False, 1, False), (0, True, 1, True), (0, True, 2, False)],
)
def test_every_element_counts_on_one_rank(tp_dim, tied, rank, counted):
    layout = ParameterLayout("x", (4, 4), tp_dim, False, tied, True)
    mesh = ParallelMesh(tp=2, pp=2, dp=1, rank=rank)
    assert bool(list(layout.owned_ranges(mesh, 0, 8))) is counted


LAYOUTS = (
    ParameterLayout("table", (24, 6), 0, False, True, True, valid_rows=21),
    ParameterLayout("norm", (6,), None, True, False, False),
    ParameterLayout("column", (8, 6), 0, False, False, True),
    ParameterLayout("router", (8, 6), None, True, False, True),
    ParameterLayout("experts", (24, 12, 6), 1, False, False, True, is_expert=True),
    ParameterLayout("expert_bias", (24, 6), None, True, False, False, is_expert=True),
    ParameterLayout("qkv", (36, 6), 0, False, False, True, packed_heads=PackedHeads(2, 4, 3)),
)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        ParallelMesh(tp=1, pp=1, dp=4, ep=2, rank=0),
        ParallelMesh(tp=1, pp=1, dp=4, ep=4, rank=0),
        ParallelMesh(tp=2, pp=2, dp=2, cp=2, ep=2, rank=0),
        ParallelMesh(tp=4, pp=1, dp=3, cp=2, ep=3, kv_copies=2, rank=0),
        ParallelMesh(tp=2, pp=2, dp=8, ep=8, loss_pp_rank=-2, rank=0),
    ],
    ids=str,
)
def test_every_element_of_dense_and_expert_parameters_counts_once(sizes, is_sharded):
    counted = {layout.name: torch.zeros(layout.global_shape).view(-1) for layout in LAYOUTS}
    for rank in range(sizes.world_size):
        mesh = sizes.at(rank)
        # The table is on the first stage and on the head's stage, possibly the same; the rest is on the first.
        layouts = LAYOUTS if mesh.is_first_stage else LAYOUTS[:1] if mesh.computes_loss else ()
        for layout, start, stop in held_ranges(layouts, mesh, is_sharded):
            if is_first_copy(layout, mesh, is_sharded):
                places = torch.arange(math.prod(layout.global_shape)).view(layout.global_shape)
                local = layout.shard(places, mesh).view(-1)
                for low, high in layout.owned_ranges(mesh, start, stop):
                    counted[layout.name][local[low:high]] += 1
    for layout in LAYOUTS:
        meaningful = counted[layout.name].view(layout.global_shape)[: layout.valid_rows]
        assert (meaningful == 1).all(), layout.name
        assert not counted[layout.name].view(layout.global_shape)[layout.valid_rows or layout.global_shape[0] :].any()


def held_ranges(layouts, mesh, is_sharded):
    """This rank's ranges of each parameter, as a gradient store cuts them."""
    named = {layout.name: layout for layout in layouts}
    parameters = {name: torch.nn.Parameter(torch.zeros(named[name].local_shape(mesh))) for name in named}
    for bucket in plan_buckets(parameters, named, mesh, 100):
        first, last = bucket.shard(mesh.expert_dp_rank if bucket.is_expert else mesh.data_rank)
        for name, (start, stop) in bucket.spans.items():
            low, high = (max(first, start), min(last, stop)) if is_sharded else (start, stop)
            if low < high:
                yield named[name], low - start, high - start
