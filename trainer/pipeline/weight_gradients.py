"""Deferred weight gradients: a backward of inputs and a later backward of weights.

Linear layers pass their weight gradient to an accumulator as the factors of a product
(trainer.model.tensor_parallel.linear). During the backward of inputs, a queue between the layers and their accumulators
keeps these products, and runs them at their place in the schedule table. The small gradients of biases, norms and
embeddings stay in the backward of inputs. Source: Qi et al. 2023 (arXiv:2401.10241), section 2.1.

The queue keeps the factors as the products take them. Under sequence parallelism the input of a column-parallel layer
has been gathered by then. The queue keeps the whole input, t times as much as 1F1B keeps, because its gather overlaps
with the input gradient and would overlap with nothing later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import nn


class _TakesGradientAccumulator(Protocol):
    gradient_accumulator: Any


class WeightGradientQueue:
    """Deferred products of one model chunk."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Callable[[], None]]] = {}
        self._recorded: deque[Callable[[], None]] | None = None

    @contextmanager
    def recording(self, micro_batch: int) -> Iterator[None]:
        """Within this context, keep the products of the chunk's layers as those of ``micro_batch``."""
        self._recorded = self._waiting[micro_batch] = deque()
        try:
            yield
        finally:
            self._recorded = None

    def run(self, micro_batch: int) -> None:
        """Run the products of ``micro_batch`` in the order of arrival.

        Each product frees its factors at once.
        """
        products = self._waiting.pop(micro_batch)
        with torch.no_grad():  # backward also runs without gradients
            while products:
                products.popleft()()

    def take(self, product: Callable[[], None]) -> None:
        """Keep a product while recording; run it at once otherwise."""
        if self._recorded is None:
            product()
        else:
            self._recorded.append(product)


class DeferredAccumulator:
    """Wraps a gradient accumulator; each method call becomes a product of the queue."""

    def __init__(self, accumulator: Any, queue: WeightGradientQueue) -> None:
        self._accumulator = accumulator
        self._queue = queue

    def __getattr__(self, name: str) -> Callable[..., None]:
        method = getattr(self._accumulator, name)

        def defer(*arguments: Any) -> None:
            self._queue.take(lambda: method(*arguments))

        return defer


@contextmanager
def deferring(chunk: nn.Module) -> Iterator[WeightGradientQueue]:
    """A queue in front of all gradient accumulators of ``chunk``, within this context."""
    queue = WeightGradientQueue()
    # modules() lists a module that a chunk uses twice only once.
    modules = [
        cast(_TakesGradientAccumulator, module)
        for module in chunk.modules()
        if getattr(module, "gradient_accumulator", None) is not None
    ]
    accumulators = [module.gradient_accumulator for module in modules]
    for module, accumulator in zip(modules, accumulators, strict=True):
        module.gradient_accumulator = DeferredAccumulator(accumulator, queue)
    try:
        yield queue
    finally:
        for module, accumulator in zip(modules, accumulators, strict=True):
            module.gradient_accumulator = accumulator
