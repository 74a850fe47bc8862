"""Putting off weight gradients: what makes a backward in two parts out of one.

Linear layers hand their weight gradient to a sink as the factors of a product (trainer.model.tensor_parallel.linear).
While the gradient of the input runs, a queue between the layers and their sinks keeps these products; it runs them
when the table says so. Everything else, biases, norms and embeddings, is small and stays where it was. Source: Qi et
al. 2023 (arXiv:2401.10241), section 2.1.

What waits are the factors as the products take them. Under sequence parallelism the input of a column-parallel layer
has been gathered by then: it is kept whole, t times what 1F1B keeps of it, since its way from the other ranks is hidden
behind the input gradient and would not be behind anything later.
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
    """The products of one chunk that wait to be run."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Callable[[], None]]] = {}
        self._recorded: deque[Callable[[], None]] | None = None

    @contextmanager
    def recording(self, micro_batch: int) -> Iterator[None]:
        """Inside, the products of the chunk's layers are kept as those of ``micro_batch``."""
        self._recorded = self._waiting[micro_batch] = deque()
        try:
            yield
        finally:
            self._recorded = None

    def run(self, micro_batch: int) -> None:
        """Run the products of ``micro_batch`` in the order they came; each frees its factors at once."""
        products = self._waiting.pop(micro_batch)
        with torch.no_grad():  # as inside a backward
            while products:
                products.popleft()()

    def take(self, product: Callable[[], None]) -> None:
        """Keep a product while recording; run it at once otherwise."""
        if self._recorded is None:
            product()
        else:
            self._recorded.append(product)


class DeferredAccumulator:
    """Stands before a gradient sink of any kind: each of its methods becomes a product of the queue."""

    def __init__(self, accumulator: Any, queue: WeightGradientQueue) -> None:
        self._accumulator = accumulator
        self._queue = queue

    def __getattr__(self, name: str) -> Callable[..., None]:
        method = getattr(self._accumulator, name)

        def put_off(*arguments: Any) -> None:
            self._queue.take(lambda: method(*arguments))

        return put_off


@contextmanager
def deferring(chunk: nn.Module) -> Iterator[WeightGradientQueue]:
    """A queue before all gradient sinks of ``chunk``, for as long as this lasts."""
    queue = WeightGradientQueue()
    # A module that is used twice in a chunk stands in modules() once.
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
