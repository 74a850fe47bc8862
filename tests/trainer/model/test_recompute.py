"""Recompute gives bitwise equal gradients from less memory."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainer.model.recompute_case import (
    EXPERT_FORMS,
    FORMS,
    FULL,
    GPT2,
    LLAMA,
    MOE,
    SELECTIVE,
    VOCAB_SIZE,
    batch,
    make_config,
)
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.distributed.random_streams import StepRandomness
from trainer.model.attention import self_attention
from trainer.model.attention.core_attention import attend
from trainer.model.context import ParallelAxes
from trainer.model.decoder import GPTStage
from trainer.model.recompute import RecomputePlan, forget, recompute
from trainer.model.sharding import ParameterBuilder
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward

UNFUSED = {**GPT2, "attention_backend": "unfused"}


def gradients(model, training):
    config = make_config(model, training)
    parallel_model = build_model(
        config, VOCAB_SIZE, ParallelMesh.build(config, 0, 1), ProcessGroups(), torch.device("cpu")
    )
    loss = forward_backward(
        parallel_model, [batch(0), batch(1)], valid_tokens=64, loss_scale=1.0, randomness=StepRandomness(1, 0)
    )
    return float(loss), {name: parallel_model.gradients.main_grad(name).clone() for name in parallel_model.parameters}


@pytest.fixture(scope="module")
def without_recompute():
    known = {}

    def run(model, precision):
        key = id(model), precision
        if key not in known:
            known[key] = gradients(model, {"bf16": precision == "bf16"})
        return known[key]

    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model", "form"),
    [(model, form) for model in (GPT2, UNFUSED, LLAMA) for form in FORMS.values()]
    + [(MOE, f) for f in EXPERT_FORMS.values()],
    ids=[f"{model}-{form}" for model in ("gpt2-dropout", "gpt2-unfused", "llama") for form in FORMS]
    + list(EXPERT_FORMS),
)
def test_gradients_are_the_same_bits(without_recompute, model, form, precision):
    dtype = {"bf16": precision == "bf16"}
    loss, expected = without_recompute(model, precision)
    found_loss, found = gradients(model, {**dtype, **form})
    assert found_loss == loss
    for name, gradient in expected.items():
        assert gradient.any(), name
        assert torch.equal(found[name], gradient), name


class CountStorages(TorchDispatchMode):
    """Remembers the memory of every result without keeping it alive."""

    def __init__(self):
        super().__init__()
        self._seen = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        results = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._seen[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return results

    def living_bytes(self, without):
        """Bytes of all storages except those at the addresses ``without``."""
        return sum(size for at, (storage, size) in self._seen.items() if at not in without and not storage.expired())


LENGTH, SAMPLES, HIDDEN, HEADS, LAYERS = 64, 2, 64, 4, 3


def kept_bytes(model, training):
    """Float32 bytes that a middle stage keeps of one micro-batch for backward."""
    shape = {"num_layers": 8, "hidden_size": HIDDEN, "num_attention_heads": HEADS, **model}
    config = make_config(shape, training, seq_length=LENGTH)
    builder = ParameterBuilder(1, ParallelMesh.build(config, 0, 1), False, torch.float32, torch.device("cpu"))
    stage = GPTStage(config, VOCAB_SIZE, range(2, 2 + LAYERS), builder, ParallelAxes(), is_first=False, is_last=False)
    hidden = torch.randn(LENGTH, SAMPLES, HIDDEN).requires_grad_()
    part, streams = batch(0, SAMPLES, LENGTH), StepRandomness(1, 0).micro_batch(0)
    with CountStorages() as storages:
        output = stage(hidden, part, streams)
        own = {parameter.untyped_storage().data_ptr() for parameter in builder.parameters.values()}
        own |= {output.untyped_storage().data_ptr(), hidden.untyped_storage().data_ptr()}
        kept = storages.living_bytes(without=own)
    output.sum().backward()
    return kept + hidden.nbytes


def test_kept_memory_falls_as_published():
    """Korthikanti et al. 2022, equation 1 and table 2.

    Numbers have 4 bytes instead of 2; masks have 1 byte.

    In the paper a layer keeps 34 sbh bytes, 2 of them masks, and in core attention 5 abs^2, 1 of them a mask.
    """
    sbh, scores = LENGTH * SAMPLES * HIDDEN, HEADS * LENGTH**2 * SAMPLES
    # In addition to the table: the query is kept a second time, multiplied by its scale.
    dense, core = (32 * 2 + 2) * sbh, (4 * 2 + 1) * scores + 4 * sbh
    mlp, norms = 2 * 16 * sbh, 2 * 4 * sbh
    expected = {
        "none": LAYERS * (dense + core),
        "core_attn": LAYERS * dense,
        "mlp": LAYERS * (dense - mlp + core),
        "mlp_act": LAYERS * (dense - mlp // 2 + core),
        "layernorm": LAYERS * (dense - norms + core),
        "all-parts": LAYERS * (dense - mlp - norms),
        "full": LAYERS * 4 * sbh,
        "uniform-3": 4 * sbh,
        "block-2": 2 * 4 * sbh + dense + core,
    }
    for form, size in expected.items():
        # Further memory: statistics of the norms, the causal mask.
        assert size <= kept_bytes(UNFUSED, FORMS.get(form, {})) <= 1.04 * size, form


def test_kept_memory_of_a_llama():
    """Without dropout and with fused attention.

    A layer keeps 8 results as wide as the model, and 3 as wide as the MLP.
    """
    sbh, ffn = LENGTH * SAMPLES * HIDDEN, LENGTH * SAMPLES * 160
    model = {**LLAMA, "num_query_groups": HEADS, "ffn_hidden_size": 160}
    expected = {"none": 8 * sbh + 3 * ffn, "mlp": 8 * sbh, "mlp_act": 8 * sbh + 2 * ffn}
    expected |= {"layernorm": 6 * sbh + 3 * ffn, "full": sbh}
    for form, size in expected.items():
        assert 4 * size <= kept_bytes(model, FORMS.get(form, {})) / LAYERS <= 1.06 * 4 * size, form


def test_attention_that_keeps_no_scores_is_not_run_again():
    replayed = []

    def attend_and_count(*arguments, **options):
        replayed.append(torch.is_grad_enabled())
        return attend(*arguments, **options)

    with mock.patch.object(self_attention, "attend", attend_and_count):
        for model, calls in ((UNFUSED, [False, True]), (GPT2, [True]), (LLAMA, [True])):
            kept_bytes(model, SELECTIVE)
            assert sorted(replayed) == sorted(LAYERS * calls)
            replayed.clear()
    for model in (GPT2, LLAMA):
        assert kept_bytes(model, SELECTIVE) == kept_bytes(model, {})


def test_layers_are_counted_per_virtual_stage():
    def plan(num_layers, **training):
        return RecomputePlan.build(make_config({}, training).training, num_layers)

    assert plan(4).runs(4) == tuple(range(i, i + 1) for i in range(4))
    assert plan(4).modules_of(0) == frozenset()
    assert plan(4, **SELECTIVE).modules_of(3) == {"core_attn"}
    assert plan(5, **FULL).groups == tuple(range(i, i + 1) for i in range(5))
    assert plan(5, **{**FULL, "recompute_num_layers": 2}).groups == (range(2), range(2, 4), range(4, 5))
    assert plan(5, **{**FULL, "recompute_num_layers": 2}).modules_of(4) == {"layer"}
    assert plan(5, **{**FULL, "recompute_num_layers": 2}).modules_of(3) == frozenset()
    block = plan(3, **FORMS["block-2"])
    assert block.groups == (range(1), range(1, 2))
    assert [block.modules_of(layer) for layer in range(3)] == [{"layer"}, {"layer"}, frozenset()]
    assert block.runs(3) == tuple(range(i, i + 1) for i in range(3))
    assert plan(1, **FORMS["block-2"]).runs(1) == (range(1),)
    assert plan(0, **FORMS["block-2"]).runs(0) == ()
    assert plan(0, **FORMS["uniform-3"]).runs(0) == ()


def test_without_gradients_the_function_just_runs():
    weight = nn.Parameter(torch.ones(3))

    def scale(tensor, **_):
        return tensor * weight

    plain = torch.ones(3)
    recompute(scale, plain).sum().backward()
    assert torch.equal(weight.grad, torch.ones(3)), "an input without gradient must not cut off the parameters"
    with torch.no_grad():
        assert recompute(scale, plain.requires_grad_()).grad_fn is None


def test_hooks_and_accumulators_get_each_contribution_once():
    layer = nn.Linear(3, 3)
    calls = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: calls.append(weight.grad.clone()))

    def inner(tensor, **_):
        return torch.tanh(layer(tensor))

    def outer(tensor, **_):
        return recompute(inner, tensor) * 2

    inputs = torch.randn(2, 3, requires_grad=True)
    recompute(outer, inputs).sum().backward()
    found, inputs.grad = inputs.grad, None
    (inner(inputs) * 2).sum().backward()
    assert torch.equal(found, inputs.grad)
    assert len(calls) == 2
    torch.testing.assert_close(calls[1], 2 * calls[0], rtol=0, atol=0)


def test_an_input_that_was_changed_in_place_is_noticed():
    hidden = torch.randn(3, requires_grad=True) * 1
    output = recompute(lambda tensor, **_: tensor * 2, hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_forgotten_results_are_computed_again():
    computed = []
    inputs = torch.randn(4, 6, requires_grad=True)

    def normed():
        computed.append(1)
        return torch.tanh(inputs.detach())

    result = torch.tanh(inputs)
    with forget(result, normed):
        # Uses a view, the whole result, and a product that needs the result twice.
        output = result.view(2, 12)[:, 3:].square().sum() + (result * result).sum() + inputs.exp().sum()
    found = torch.autograd.grad(output, inputs)[0]
    expected = torch.tanh(inputs)
    plain = expected.view(2, 12)[:, 3:].square().sum() + (expected * expected).sum() + inputs.exp().sum()
    assert torch.equal(found, torch.autograd.grad(plain, inputs)[0])
    assert computed, "nothing was forgotten"


class Queue:
    """A gradient accumulator that defers the products, as a schedule with split backward does."""

    def __init__(self, accumulator):
        self._accumulator, self._waiting = accumulator, []

    def add_outer(self, grad_output, inputs):
        self._waiting.append((grad_output, inputs))

    def run(self):
        for factors in self._waiting:
            self._accumulator.add_outer(*factors)


@pytest.mark.parametrize("form", [*FORMS.values()], ids=[*FORMS])
def test_weight_gradients_may_be_computed_later(without_recompute, form):
    _, expected = without_recompute(LLAMA, "fp32")
    config = make_config(LLAMA, form)
    model = build_model(config, VOCAB_SIZE, ParallelMesh.build(config, 0, 1), ProcessGroups(), torch.device("cpu"))
    queues = []
    for module in model.chunks[0].modules():
        if hasattr(module, "gradient_accumulator"):
            module.gradient_accumulator = Queue(module.gradient_accumulator)
            queues.append(module.gradient_accumulator)
    finish = model.gradients.finish

    def run_queues_first():
        for queue in queues:
            queue.run()
        finish()

    model.gradients.finish = run_queues_first
    forward_backward(model, [batch(0), batch(1)], valid_tokens=64, loss_scale=1.0, randomness=StepRandomness(1, 0))
    for name, gradient in expected.items():
        assert torch.equal(model.gradients.main_grad(name), gradient), name
