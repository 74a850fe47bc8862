"""Measurements of a device by itself: products, attention, memory, starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from trainer.speed_test.sample import Sample
from trainer.speed_test.sizes import BACKWARD, Sizes, attention_work, product_work

if TYPE_CHECKING:
    from trainer.speed_test.clock import Clock

_LAUNCH_TRIES = 7


def dtype_of(device: torch.device) -> torch.dtype:
    """bf16, or float32 where the device has no bf16 of its own."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float32


def measure_device(clock: Clock, sizes: Sizes, begin: Callable[..., None]) -> Iterator[Sample]:
    """Measure one device.

    Args:
        clock: of the device.
        sizes: of the measurements.
        begin: is told kind and size of each step before it begins.
    """
    dtype = dtype_of(clock.device)
    for product in sizes.products:
        begin("product", _text(product))
        yield _product(clock, product, dtype)
    for attention in sizes.attentions:
        begin("attention", _text(attention))
        yield from _attention(clock, attention, dtype)
    begin("copy")
    yield _copy(clock, sizes.copy)
    begin("launch")
    yield _launch(clock, sizes.launches)


def name_of(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)


def _product(clock: Clock, shape: tuple[int, int, int], dtype: torch.dtype) -> Sample:
    m, n, k = shape
    # Random values: a GPU that multiplies constants takes less power, and so runs faster than in training.
    x = torch.randn(m, k, device=clock.device, dtype=dtype)
    w = torch.randn(n, k, device=clock.device, dtype=dtype)
    timing = clock.time(lambda: linear(x, w))
    return Sample("product", name_of(dtype), product_work(shape), timing.seconds, timing.repetitions, shape=(m, n, k))


def _attention(clock: Clock, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Iterator[Sample]:
    operands = [torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3)]
    query, key, value = operands

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    with torch.no_grad():
        timing = clock.time(forward)
    work, name = attention_work(shape), name_of(dtype)
    yield Sample("attention forward", name, work, timing.seconds, timing.repetitions, shape=shape)
    output = forward()
    gradient = torch.randn_like(output)
    timing = clock.time(lambda: torch.autograd.grad(output, operands, gradient, retain_graph=True))
    yield Sample("attention backward", name, BACKWARD * work, timing.seconds, timing.repetitions, shape=shape)


def _copy(clock: Clock, size: int) -> Sample:
    source = torch.randint(0, 256, (size,), device=clock.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    timing = clock.time(lambda: target.copy_(source))
    return Sample("copy", "uint8", 2.0 * size, timing.seconds, timing.repetitions, bytes=size)


def _launch(clock: Clock, count: int) -> Sample:
    value, times = torch.zeros(64, device=clock.device), []
    for number in range(_LAUNCH_TRIES + 1):
        clock.wait()
        began = time.perf_counter()
        for _ in range(count):
            value.add_(1.0)
        # Before the wait: the device may take longer or shorter than the host.
        seconds = (time.perf_counter() - began) / count
        if number:  # the first one warms up
            times.append(seconds)
    clock.wait()
    return Sample("launch", "float32", 1.0, median(times), _LAUNCH_TRIES)
