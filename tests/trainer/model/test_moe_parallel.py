"""A layer with experts on any layout equals the layer on one rank.

The results agree to the last digits of float64.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.trainer.model.moe_layers import AUX_LOSS_SCALE, Layout, distance, run_layout
from tests.trainer.spawn import RankError, Ranks
from trainer.model.moe import layer, losses
from trainer.model.moe.capacity import kept_choices
from trainer.model.sharding import ParameterBuilder, ParameterLayout
from trainer.model.tensor_parallel.collectives import enter_parallel_region

SWIGLU = {"swiglu": True, "disable_bias_linear": True}
LOSSES = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
CAPACITY = {**SWIGLU, **LOSSES, "moe_expert_capacity_factor": 0.6}
MODELS = {
    "losses": {**SWIGLU, **LOSSES},
    "gelu-with-biases": {**LOSSES, "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 8},
    "sigmoid": {**SWIGLU, **LOSSES, "moe_router_score_function": "sigmoid", "moe_router_topk": 3},
    "drops-by-probability": CAPACITY,
    "drops-by-position": {**CAPACITY, "moe_token_drop_policy": "position", "moe_router_pre_softmax": True},
}
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(tp=4, sp=True),
    Layout(dp=2),
    Layout(dp=2, ep=2),
    Layout(cp=2),
    Layout(cp=2, ep=2),
    Layout(cp=4, ep=4),
    Layout(cp=2, ep=2, comm="a2a"),
    Layout(cp=2, dp=2, ep=4),
    Layout(cp=2, dp=2, ep=2),
    Layout(tp=2, dp=2, ep=2),
    Layout(tp=2, dp=2, ep=2, sp=True),
    Layout(tp=2, cp=2, ep=2, sp=True),
    Layout(tp=2, cp=2),
]
LIMIT = 1e-12


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def serial(ranks):
    """The layer on one rank, computed once per model."""
    found = {}

    def run(model):
        key = repr(model)
        if key not in found:
            found[key] = run_layout(ranks, model, Layout())
        return found[key]

    return run


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_outputs_and_gradients_equal_the_serial_layer(ranks, serial, model, layout):
    worst, name = distance(serial(model), run_layout(ranks, model, layout))
    assert worst <= LIMIT, f"{name} is off by {worst:.1e}"


def test_auxiliary_losses_move_the_gradient_of_router_and_tokens(ranks, serial):
    without = run_layout(ranks, MODELS["losses"], Layout(), scale=0.0)
    with_losses = serial(MODELS["losses"])
    assert torch.equal(without.outputs, with_losses.outputs)
    for name, gradient in with_losses.gradients.items():
        assert torch.equal(gradient, without.gradients[name]) == ("router" not in name), name
    worst, _ = distance(with_losses, without)
    assert worst > 1e6 * LIMIT, "too small for the tests above to detect"


def test_capacity_drops_some_and_not_all(ranks, serial):
    everything = run_layout(ranks, {**SWIGLU, **LOSSES}, Layout())
    for policy in ("drops-by-probability", "drops-by-position"):
        dropped = serial(MODELS[policy]).outputs != everything.outputs
        assert dropped.any()
    assert not torch.equal(serial(MODELS["drops-by-probability"]).outputs, serial(MODELS["drops-by-position"]).outputs)


@contextmanager
def auxiliary_loss_on_every_tp_rank():
    def attach(carrier, loss, scale):
        return losses.attach_loss(carrier, loss, scale * 2)

    with mock.patch.object(layer, "attach_loss", attach):
        yield


@contextmanager
def choices_of_this_rank_only():
    real = losses.load_balancing_loss

    def alone(routing, num_tokens, cp):
        return real(routing, num_tokens, replace(cp, group=None))

    with mock.patch.object(losses, "load_balancing_loss", alone):
        yield


@contextmanager
def mean_over_this_rank_only():
    real = losses.load_balancing_loss

    def halved(routing, num_tokens, cp):
        return real(routing, num_tokens // cp.size, cp)

    with mock.patch.object(losses, "load_balancing_loss", halved):
        yield


@contextmanager
def capacity_of_this_rank_only():
    def alone(experts, weights, num_experts, factor, policy, cp):
        return kept_choices(experts, weights, num_experts, factor, policy, replace(cp, size=1, group=None))

    with mock.patch.object(layer, "kept_choices", alone):
        yield


@contextmanager
def no_sum_of_token_gradients():
    def enter(inputs, tp):
        return inputs if not tp.sequence_parallel else enter_parallel_region(inputs, tp)

    with mock.patch.object(layer, "enter_parallel_region", enter):
        yield


@contextmanager
def router_declared_complete():
    with mock.patch.object(ParameterBuilder, "_is_partial", lambda *_: False):
        yield


class DividedAndDense(ParameterLayout):
    """A layout divided over ep, but marked as dense.

    Its gradient is summed over all ranks, as for shared parameters.
    """

    @property
    def _expert_dim(self):
        return 0


@contextmanager
def experts_declared_dense():
    add = ParameterBuilder._add

    def add_as_dense(self, layout, local):
        declared = DividedAndDense(**{**vars(layout), "is_expert": False}) if layout.is_expert else layout
        return add(self, declared, local)

    with mock.patch.object(ParameterBuilder, "_add", add_as_dense):
        yield


@contextmanager
def tokens_back_in_the_order_of_arrival():
    real = dist.all_to_all_single

    def swapped(output, rows, received=None, sent=None, group=None):
        real(output, rows, received, sent, group=group)
        if rows.is_floating_point() and len(output) > 1:
            output[[0, 1]] = output[[1, 0]]

    with mock.patch.object(dist, "all_to_all_single", swapped):
        yield


@pytest.mark.parametrize(
    ("layout", "model", "mutation", "symptom"),
    [
        (Layout(tp=2), "losses", auxiliary_loss_on_every_tp_rank, "router.weight is off"),
        (Layout(cp=2), "losses", choices_of_this_rank_only, "is off"),
        (Layout(cp=2), "losses", mean_over_this_rank_only, "is off"),
        (Layout(cp=2), "drops-by-position", capacity_of_this_rank_only, "is off"),
        (Layout(tp=2), "losses", no_sum_of_token_gradients, "input gradients|tp ranks differ"),
        (Layout(tp=2), "losses", router_declared_complete, "copies of router.weight differ"),
        (Layout(dp=2, ep=2), "losses", experts_declared_dense, "experts.* is off"),
        (Layout(dp=2, ep=2), "losses", tokens_back_in_the_order_of_arrival, "is off"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_broken_layer_is_caught(ranks, serial, layout, model, mutation, symptom):
    with pytest.raises(AssertionError, match=symptom) as caught:
        worst, name = distance(
            serial(MODELS[model]), run_layout(ranks, MODELS[model], layout, AUX_LOSS_SCALE, mutation)
        )
        assert worst <= LIMIT, f"{name} is off by {worst:.1e}"
    assert not isinstance(caught.value, RankError), "the mutation crashed instead of giving wrong numbers"
