"""Further numbers of a row: those of the serial run in every layout, and no message without a request."""

import math
from datetime import timedelta
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from tests.trainer.parity.layout_parity import disturb_vectors
from tests.trainer.parity.parity_case import VOCAB_SIZE, Case
from tests.trainer.spawn import DEADLINE_S
from trainer.config.sections.logging import LoggingConfig
from trainer.distributed.collectives import sum_over_ranks
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.model.moe.router import Router
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward
from trainer.training.step_numbers import StepNumbers, router_row

EVERYTHING = LoggingConfig(
    log_params_norm=True, log_num_zeros_in_grad=True, log_layer_norms=True, moe_per_layer_logging=True
)
# Of norms in float32, whose sums have another order in each layout.
TOLERANCE = 1e-5
# Biases of keys, whose gradient is 0 up to rounding: of 3 layers, 2 groups and 4 channels.
UNCERTAIN_ZEROS = {"qwen": 24}


def start(rank, world_size, case, logging=EVERYTHING):
    config = case.config().model_copy(update={"logging": logging})
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    model = build_model(config, VOCAB_SIZE, mesh, groups, torch.device("cpu"))
    disturb_vectors(model)
    return config, model, MixedPrecisionOptimizer(config, model)


def step(case, config, model, optimizer, numbers, iteration):
    forward_backward(
        model,
        case.batch(iteration)[model.mesh.dp_rank :: model.mesh.dp],
        valid_tokens=case.valid_tokens(iteration),
        loss_scale=optimizer.loss_scaler.scale,
        randomness=StepRandomness(config.training.seed, iteration),
    )
    scale = optimizer.loss_scaler.scale
    numbers.read(iteration + 1)
    norm = optimizer.step(config.optimizer.lr).grad_norm
    further = model.take_further_losses()
    totals = sum_over_ranks(list(chain.from_iterable(further.values())), torch.device("cpu"))
    means = {name: total / count for name, total, count in zip(further, totals[::2], totals[1::2], strict=True)}
    return norm, numbers.row(iteration + 1, scale, 8) | means


def train(rank, world_size, case, logging):
    """Gradient norm and numbers of one iteration, and the norm of the whole weights that this rank holds."""
    config, model, optimizer = start(rank, world_size, case, logging)
    norm, row = step(case, config, model, optimizer, StepNumbers(config, model, optimizer), 0)
    model.gradients.wait_for_weights()
    whole = math.sqrt(sum(float(weight.detach().double().square().sum()) for weight in model.parameters.values()))
    return norm, row, whole


@pytest.fixture(scope="module")
def serial(ranks):
    made = {}

    def numbers(case):
        if case.serial not in made:
            [(norm, row, whole)] = ranks.run(train, case.serial, EVERYTHING, world_size=1)
            made[case.serial] = row
            # The serial numbers themselves: against norms by other ways.
            assert row["params_norm"] == pytest.approx(whole, rel=TOLERANCE)
            for name, total in (("layer_grad_norms", norm), ("layer_params_norms", row["params_norm"])):
                assert math.sqrt(sum(one**2 for one in row[name].values())) == pytest.approx(total, rel=TOLERANCE)
        return made[case.serial]

    return numbers


def assert_same(found, expected, uncertain_zeros):
    if uncertain_zeros:
        assert found["num_zeros_in_grad"] == pytest.approx(expected["num_zeros_in_grad"], abs=uncertain_zeros)
    else:
        assert found["num_zeros_in_grad"] == expected["num_zeros_in_grad"] > 0
    assert found["params_norm"] == pytest.approx(expected["params_norm"], rel=TOLERANCE)
    for kind in ("layer_grad_norms", "layer_params_norms"):
        assert list(found[kind]) == list(expected[kind])
        assert found[kind] == pytest.approx(expected[kind], rel=TOLERANCE)
    assert list(found.get("moe_layers", ())) == list(expected.get("moe_layers", ()))
    for layer, numbers in expected.get("moe_layers", {}).items():
        assert found["moe_layers"][layer] == pytest.approx(numbers, rel=TOLERANCE)
    losses = [name for name in expected if name.endswith("_loss")]
    assert [found[name] for name in losses] == pytest.approx([expected[name] for name in losses], rel=TOLERANCE)


LLAMA = Case("llama", micro_batches=2)
GPT2 = Case("gpt2", micro_batches=2)
MIXTRAL = Case("mixtral", micro_batches=2)
LAYOUTS = [
    LLAMA.but(tp=2),
    LLAMA.but(tp=2, sp=True, dp=2, micro_batches=1),
    LLAMA.but(cp=2),
    LLAMA.but(pp=2, schedule="interleaved", layers=5),
    # A word table on both ends, and vocabulary padding.
    Case("qwen", tp=4, micro_batches=2),
    Case("qwen", tp=2, pp=2, micro_batches=2),
    *(LLAMA.but(dp=2, zero=zero, micro_batches=1) for zero in range(4)),
    LLAMA.but(dp=2, zero=1, offload=True, micro_batches=1),
    MIXTRAL.but(dp=2, ep=2, micro_batches=1),
    MIXTRAL.but(tp=2, dp=2, ep=2, zero=2, micro_batches=1),
    MIXTRAL.but(cp=2, tp=2, recompute="uniform"),
    MIXTRAL.but(pp=2, recompute="moe", schedule="zb-h1"),
    Case("deepseek", pp=2, dp=2, ep=2, micro_batches=1),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_layout_has_the_numbers_of_the_serial_run(ranks, serial, case):
    reports = ranks.run(train, case, EVERYTHING, world_size=case.world_size)
    assert all(row == reports[0][1] for _, row, _ in reports)
    assert_same(reports[0][1], serial(case), UNCERTAIN_ZEROS.get(case.model, 0))


def test_layers_have_the_names_of_the_weights(serial):
    assert list(serial(LLAMA.but(layers=3))["layer_grad_norms"]) == [
        "embedding",
        "final_norm",
        "head",
        "layers.0",
        "layers.1",
        "layers.2",
    ]


def route(rank, world_size, case):
    """The row of one iteration, and by plain formulas the numbers of each layer with experts."""
    config, model, optimizer = start(rank, world_size, case)
    numbers = StepNumbers(config, model, optimizer)
    seen = {}
    for router in (module for chunk in model.chunks for module in chunk.modules() if isinstance(module, Router)):
        router.register_forward_hook(lambda router, _, routing: seen.setdefault(id(router), []).append(routing))
    _, row = step(case, config, model, optimizer, numbers, 0)
    by_hand = []
    for routings in seen.values():
        load = sum(torch.bincount(one.experts.flatten(), minlength=4) for one in routings).double()
        shares = [torch.bincount(one.experts.flatten(), minlength=4) / one.experts.numel() for one in routings]
        balance = [4 * (f * one.shares.mean(0)).sum() for f, one in zip(shares, routings, strict=True)]
        z_loss = [one.logits.logsumexp(1).square().mean() for one in routings]
        share = load / load.sum()
        by_hand.append(
            {
                "load_balancing_loss": float(torch.stack(balance).mean()),
                "z_loss": float(torch.stack(z_loss).mean()),
                "load_max_over_mean": float(load.max() / load.mean()),
                "load_entropy": float(-(share * share.log()).nansum() / math.log(4)),
            }
        )
    return row, by_hand


def test_numbers_of_experts_are_those_of_their_formulas(ranks):
    [(row, by_hand)] = ranks.run(route, MIXTRAL, world_size=1)
    assert list(row["moe_layers"]) == ["layers.0", "layers.1", "layers.2"]
    for found, expected in zip(row["moe_layers"].values(), by_hand, strict=True):
        assert found == pytest.approx(expected, rel=TOLERANCE)
    for name in ("load_balancing_loss", "z_loss"):
        assert row[name] == pytest.approx(sum(layer[name] for layer in by_hand) / 3, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("load", "most", "entropy"), [([3, 3, 3], 1.0, 1.0), ([6, 0, 0], 3.0, 0.0), ([2, 2, 0], 1.5, math.log(2, 3))]
)
def test_load_of_experts(load, most, entropy):
    assert router_row(["z_loss"], [6.0, 4.0, *load]) == pytest.approx(
        {"z_loss": 1.5, "load_max_over_mean": most, "load_entropy": entropy}
    )


def test_an_auxiliary_loss_that_is_not_finite_is_none():
    assert router_row(["z_loss"], [math.nan, 4.0, 1.0, 1.0])["z_loss"] is None


def count_messages(rank, world_size, case, logging):
    """Numbers of rows, and calls of collectives that they took."""
    config, model, optimizer = start(rank, world_size, case, logging)
    calls = []

    def counted(function):
        def call(*arguments, **options):
            calls.append(function.__name__)
            return function(*arguments, **options)

        return call

    names = ("all_reduce", "all_gather_object", "broadcast", "all_gather", "barrier")
    original = {name: getattr(dist, name) for name in names}
    numbers = None
    taken = []
    try:
        for name in names:
            setattr(dist, name, counted(original[name]))
        numbers = StepNumbers(config, model, optimizer)
        for iteration in range(4):
            calls_before = len(calls)
            numbers.read(iteration + 1)
            taken.append((sorted(numbers.row(iteration + 1, 1.0, 8)), len(calls) - calls_before))
    finally:
        for name, function in original.items():
            setattr(dist, name, function)
    return calls, taken


def test_numbers_cost_nothing_unless_asked_and_one_message_at_their_interval(ranks):
    case = LLAMA.but(dp=2, micro_batches=1)
    calls, taken = ranks.run(count_messages, case, LoggingConfig(), world_size=2)[0]
    assert not calls and taken == [([], 0)] * 4
    _, taken = ranks.run(count_messages, case, LoggingConfig(log_params_norm=True, numbers_interval=2), world_size=2)[0]
    assert taken == [([], 0), (["params_norm"], 1)] * 2
    sizes = LoggingConfig(log_memory=True, log_batch_size=True, log_world_size=True)
    _, taken = ranks.run(count_messages, case, sizes, world_size=2)[0]
    assert taken == [(["batch_size", "memory_allocated_bytes", "world_size"], 1)] * 4


def overflow(rank, world_size, case):
    config, model, optimizer = start(rank, world_size, case)
    numbers = StepNumbers(config, model, optimizer)
    shard = next(shard for shard in model.gradients.parameter_shards if shard.name.startswith("layers.1."))
    shard.gradient[0] = math.inf
    numbers.read(1)
    return numbers.row(1, 1.0, 8)


def test_the_layer_of_an_overflow_is_none(ranks):
    [row] = ranks.run(overflow, LLAMA, world_size=1)
    assert [layer for layer, norm in row["layer_grad_norms"].items() if norm is None] == ["layers.1"]
    assert all(row["layer_params_norms"].values())


def test_the_norm_of_16_bit_weights_is_that_of_their_masters(ranks):
    [(_, row, whole)] = ranks.run(train, LLAMA.but(precision="bf16"), EVERYTHING, world_size=1)
    [(_, masters)] = ranks.run(norm_of_masters, LLAMA.but(precision="bf16"), world_size=1)
    assert row["params_norm"] == pytest.approx(masters, rel=1e-7)
    assert row["params_norm"] != pytest.approx(whole, rel=1e-6)


def norm_of_masters(rank, world_size, case):
    config, model, optimizer = start(rank, world_size, case)
    row = step(case, config, model, optimizer, StepNumbers(config, model, optimizer), 0)
    masters = optimizer.tensors()["master"].values()
    return row, math.sqrt(sum(float(master.double().square().sum()) for master in masters))
