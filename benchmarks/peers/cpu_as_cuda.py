"""Patch torch so that a trainer for CUDA runs on the CPU.

Import this module before the trainer. Every ``cuda`` device becomes the CPU, streams and events do nothing, the random
state is the CPU's, and process groups use gloo. The computation itself is unchanged.
"""

import contextlib
import functools
from typing import Any

import torch
import torch._dynamo  # Before the patches: dynamo records torch's functions by identity on import.
import torch.distributed as dist

CPU = torch.device("cpu")


class Idle:
    """Stub for a stream or an event, which never waits."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


class Properties:
    """Device properties that trainers query."""

    name, major, minor, multi_processor_count, total_memory = "cpu", 8, 0, 1, 2**34


def is_cuda(device: Any) -> bool:
    return (isinstance(device, int) and not isinstance(device, bool)) or "cuda" in str(device)


def on_cpu(function: Any) -> Any:
    """Wrap a function so that its ``device`` argument becomes the CPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return call


def replace_devices() -> None:
    """Redirect all functions with a CUDA device to the CPU."""
    factories = ("empty", "zeros", "ones", "tensor", "full", "arange", "rand", "randn", "as_tensor")
    for name in (*factories, "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    to, type_of = torch.Tensor.to, torch.Tensor.type

    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(CPU if isinstance(a, (str, torch.device)) and is_cuda(a) else a for a in args)
        if kwargs.get("device") is not None and is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.to, torch.Tensor.type = move, cuda_type
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    for name in ("FloatTensor", "LongTensor", "IntTensor", "ByteTensor", "HalfTensor", "BFloat16Tensor"):
        setattr(torch.cuda, name, getattr(torch, name))


def replace_runtime() -> None:
    """Replace streams, events, memory statistics and random state of CUDA."""
    nothing, zero = lambda *_, **__: None, lambda *_, **__: 0
    answers = {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: Properties(),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "current_stream": lambda *_, **__: Idle(),
        "default_stream": lambda *_, **__: Idle(),
        "stream": lambda *_, **__: contextlib.nullcontext(),
        "Stream": Idle,
        "Event": Idle,
    }
    answers |= dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), nothing)
    answers |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), zero)
    answers |= dict.fromkeys(("manual_seed", "manual_seed_all"), torch.random.default_generator.manual_seed)
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = nothing


def replace_groups() -> None:
    """Use gloo for process groups of any requested backend."""
    new_group, barrier = dist.new_group, dist.barrier

    def gloo_group(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in {"pg_options", "device_id"}}
        return new_group(*args, **kwargs | {"backend": "gloo"})

    dist.new_group = dist.distributed_c10d.new_group = gloo_group
    dist.barrier = lambda group=None, **_: barrier(group=group)


replace_devices()
replace_runtime()
replace_groups()
