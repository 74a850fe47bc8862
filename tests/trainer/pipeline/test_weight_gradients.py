"""Deferred weight gradients: kept during backward of inputs, run in order, freed singly."""

import weakref

import pytest
import torch
from torch import nn

from trainer.data_parallel.main_gradient import MainGradient
from trainer.model.moe.router import _Logits
from trainer.pipeline.weight_gradients import deferring


class RecordingAccumulator:
    """Logs its calls, and the number of live factors at each call."""

    def __init__(self, factors):
        self.got = []
        self.alive = []
        self._factors = factors

    def add_outer(self, grad_output, inputs):
        assert not torch.is_grad_enabled()
        self.got.append((float(grad_output), float(inputs)))
        self.alive.append(sum(reference() is not None for reference in self._factors))

    def add_grouped_outer(self, grad_output, inputs, offsets):
        self.got.append((float(grad_output), float(inputs), offsets))


class Layer(nn.Module):
    def __init__(self, accumulator):
        super().__init__()
        self.gradient_accumulator = accumulator


@pytest.fixture
def parts():
    factors = []
    accumulator = RecordingAccumulator(factors)

    def factor(value):
        tensor = torch.tensor(value, requires_grad=True)
        factors.append(weakref.ref(tensor))
        return tensor

    return nn.Sequential(Layer(accumulator), nn.Linear(1, 1), Layer(None)), accumulator, factor


def test_products_run_when_it_is_their_turn_and_free_their_factors(parts):
    chunk, accumulator, factor = parts
    with deferring(chunk) as queue:
        for micro_batch in (0, 1):
            with queue.recording(micro_batch):
                chunk[0].gradient_accumulator.add_outer(factor(10.0 + micro_batch), factor(1.0))
                chunk[0].gradient_accumulator.add_outer(factor(20.0 + micro_batch), factor(2.0))
        assert accumulator.got == []
        queue.run(0)
        assert accumulator.got == [(10.0, 1.0), (20.0, 2.0)]
        # Eight factors wait; those of a product live while it runs, and are freed before the next one.
        assert accumulator.alive == [8, 6]
        queue.run(1)
        assert accumulator.got[2:] == [(11.0, 1.0), (21.0, 2.0)]
        assert accumulator.alive[2:] == [4, 2]


def test_whole_backwards_are_not_deferred(parts):
    chunk, accumulator, _ = parts
    with deferring(chunk), torch.no_grad():
        chunk[0].gradient_accumulator.add_outer(torch.tensor(3.0), torch.tensor(4.0))
        assert accumulator.got == [(3.0, 4.0)]


def test_accumulators_of_any_kind_are_deferred(parts):
    chunk, accumulator, _ = parts
    with deferring(chunk) as queue:
        with queue.recording(5):
            chunk[0].gradient_accumulator.add_grouped_outer(torch.tensor(1.0), torch.tensor(2.0), [0, 1])
        assert accumulator.got == []
        queue.run(5)
    assert accumulator.got == [(1.0, 2.0, [0, 1])]


def test_a_routers_tokens_are_kept_in_their_own_dtype():
    """The queue keeps no float32 copy, which the product makes for itself."""
    main = torch.zeros(4, 8)
    accumulator = MainGradient(main, lambda: None)
    accumulator.sources = 1
    accumulator.begin(1)
    tokens = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    weight = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)
    kept = []

    class Noting:
        def add_outer(self, grad_output, inputs):
            kept.append((grad_output, inputs))

    _Logits.apply(tokens, weight, Noting()).sum().backward()
    [(grad_logits, inputs)] = kept
    assert inputs.dtype == torch.bfloat16
    assert inputs.data_ptr() == tokens.data_ptr()
    accumulator.add_outer(grad_logits, inputs)
    torch.testing.assert_close(main, tokens.detach().float().sum(0).expand(4, 8))


def test_accumulators_are_restored_after_a_failure(parts):
    chunk, accumulator, _ = parts
    with pytest.raises(RuntimeError, match="broken"), deferring(chunk) as queue, queue.recording(0):
        assert chunk[0].gradient_accumulator is not accumulator
        raise RuntimeError("broken")
    assert chunk[0].gradient_accumulator is accumulator
    assert chunk[2].gradient_accumulator is None


def test_one_contribution_too_many_is_refused():
    """An extra contribution must not change a gradient in a running reduction."""
    filled = []
    accumulator = MainGradient(torch.zeros(2, 3), lambda: filled.append(1))
    factors = torch.ones(4, 2), torch.ones(4, 3)
    with pytest.raises(AssertionError, match="too many"):
        accumulator.add_outer(*factors)
    accumulator.sources = 2
    accumulator.begin(2)
    for _ in range(4):
        accumulator.add_outer(*factors)
    with pytest.raises(AssertionError, match="too many"):
        accumulator.add_outer(*factors)
    assert filled == [1]
