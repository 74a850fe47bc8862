"""Benchmark of operations: all available backends, plain torch, and the speed of a copy."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from trainer.ops.bench_case import Bench, Case, Draw, Size
from trainer.ops.dispatch.registry import OPERATIONS
from trainer.ops.dispatch.selection import choose_kernels, implementation_problem, name_of
from trainer.ops.dispatch.setup import KernelSetup
from trainer.ops.operation import BACKENDS, Backend, Operation
from trainer.planning.kernel_choice import RequestedBackend

if TYPE_CHECKING:
    from trainer.ops.build.build_settings import BuildSettings
    from trainer.ops.dispatch.selection import Availability

BENCHES: Mapping[str, Bench] = {
    operation.name: operation.bench for operation in OPERATIONS if operation.bench is not None
}
"""Operation -> benchmark."""
PLAIN = "plain"
SMALL = "small"
_SAMPLE_S = 0.005
"""A sample of shorter calls measures several calls."""
_MOST_BUFFERS = 64
_CACHES = 2
"""Rotating buffers fill this multiple of a GPU's L2 cache, so that no call finds its buffers cached."""
_LARGE = 1 << 20
"""Elements above which a CPU, but not a GPU, takes longer than the call overhead."""
_TIMES_FOR_GPU = 8
"""Factor on large sizes for GPUs. A GPU finishes 4096 x 4096 bfloat16 before Python has launched the next call."""
_AUTO = RequestedBackend("auto", "training.kernel_backend", False)


@dataclass(frozen=True)
class Plan:
    """Settings of a measurement.

    Attributes:
        repeats: number of samples; the result is their median.
        copy_mib: size of the copied tensor, larger than the caches.
        by_cpu_time: measure CPU time of the calling thread, for machines with other load.
        forward_only: measure forward without backward.
    """

    repeats: int = 7
    copy_mib: int = 256
    by_cpu_time: bool = False
    forward_only: bool = False


@dataclass(frozen=True)
class Measurement:
    """Measurement of one backend of one operation at one size.

    The backend ``plain`` is the code that users write in torch. ``small`` is the function that replaces a kernel at
    sizes for which a kernel call costs more than it saves.

    Attributes:
        device: device type.
        dtype: dtype of the activations.
        operation: name of the operation.
        size: size of the arguments; see the operation's bench.
        backend: the measured backend.
        is_chosen: True if ``auto`` chooses this backend here at this size.
        seconds: median time of a call, including backward unless it is left out.
        gb_per_s: counted bytes divided by the time.
        of_copy: ``gb_per_s`` divided by the speed of a copy.
        of_reference: speedup over the reference.
        of_plain: speedup over plain.
        problem: reason for a failed measurement, whose figures are 0; empty otherwise.
    """

    device: str
    dtype: str
    operation: str
    size: str
    backend: str
    is_chosen: bool
    seconds: float
    gb_per_s: float
    of_copy: float
    of_reference: float
    of_plain: float
    problem: str = ""


class Stopwatch:
    """Timer of calls on a device."""

    def __init__(self, device: torch.device, plan: Plan) -> None:
        self._is_cuda = device.type == "cuda"
        self._clock = time.thread_time if plan.by_cpu_time else time.perf_counter

    def seconds(self, call: Callable[[], object], times: int) -> float:
        """Average time of one of several consecutive calls."""
        if self._is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(times):
                call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / times
        began = self._clock()
        for _ in range(times):
            call()
        return (self._clock() - began) / times

    def medians(self, calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        """Median time of each call, with interleaved samples: a slow moment affects all calls."""
        times = {}
        for name, call in calls.items():
            call()  # Warm-up: the first call allocates and compiles.
            times[name] = max(1, int(_SAMPLE_S / max(self.seconds(call, 1), 1e-7)))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                if times[name] > 1:
                    call()  # Warm the caches, which may hold the data of the previous function.
                samples[name].append(self.seconds(call, times[name]))
        return {name: statistics.median(found) for name, found in samples.items()}


def copy_speed(device: torch.device, plan: Plan) -> float:
    """Speed of a tensor copy in bytes per second, read plus written."""
    source = torch.ones(plan.copy_mib << 18, device=device)
    target = torch.empty_like(source).fill_(0.0)
    found = Stopwatch(device, plan).medians({"copy": lambda: target.copy_(source)}, plan.repeats)
    return 2 * source.nbytes / found["copy"]


def measure(
    requested: Mapping[str, Sequence[Size]],
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    plan: Plan,
    settings: BuildSettings,
    copy_bytes_per_s: float,
) -> Iterator[Measurement]:
    """Measure operations on one device.

    Args:
        requested: operation -> sizes; empty: the usual sizes of its bench.
        device: device of the measurement.
        dtypes: dtypes of the activations.
        plan: settings of the measurement.
        settings: cache folder of the built kernels.
        copy_bytes_per_s: speed of a copy, for comparison.
    """
    operations = [operation for operation in OPERATIONS if operation.name in requested]
    auto = {operation.name: _AUTO for operation in operations}
    availability = KernelSetup(settings, device).availability(auto)
    for dtype in dtypes:
        chosen = choose_kernels(auto, availability, device, dtype, is_alone=True).backends
        for operation in operations:
            for size in requested[operation.name] or usual_sizes(BENCHES[operation.name], device):
                yield from _measure_case(
                    operation, size, device, dtype, plan, availability, chosen[operation.name], copy_bytes_per_s
                )


def usual_sizes(bench: Bench, device: torch.device) -> list[Size]:
    """The sizes of a bench; on a GPU the large sizes are multiplied."""
    times = _TIMES_FOR_GPU if device.type == "cuda" else 1
    return [(times * size[0], *size[1:]) if math.prod(size) >= _LARGE else size for size in bench.sizes]


def _measure_case(
    operation: Operation[Any],
    size: Size,
    device: torch.device,
    dtype: torch.dtype,
    plan: Plan,
    availability: Availability,
    chosen: Backend,
    copy_bytes_per_s: float,
) -> Iterator[Measurement]:
    row = (device.type, name_of(dtype), operation.name, "x".join(map(str, size)))
    try:
        cases = _cases(operation, size, device, dtype)
    except (RuntimeError, TypeError) as error:  # such as out of memory, or sizes beyond int64
        yield Measurement(*row, PLAIN, False, 0.0, 0.0, 0.0, 0.0, 0.0, _first_line(error))
        return
    functions, problems = _functions(operation, device, dtype, availability)
    moved_bytes = cases[0].forward_bytes + (0 if plan.forward_only else cases[0].backward_bytes)
    used = _used(operation, chosen, device, cases[0])
    if used == SMALL:
        functions[SMALL] = operation.small
    calls = {name: _call(cases, function, plan) for name, function in functions.items()}
    for name in list(calls):
        try:
            for _ in cases:
                calls[name]()
        except RuntimeError as error:  # such as out of memory for one backend
            problems[name] = _first_line(error)
            del calls[name]
    medians = Stopwatch(device, plan).medians(calls, plan.repeats)
    for name, seconds in medians.items():
        speed = moved_bytes / seconds
        of_reference, of_plain = (medians.get(other, 0.0) / seconds for other in ("reference", PLAIN))
        yield Measurement(
            *row, name, name == used, seconds, speed / 1e9, speed / copy_bytes_per_s, of_reference, of_plain
        )
    for name, problem in problems.items():
        yield Measurement(*row, name, False, 0.0, 0.0, 0.0, 0.0, 0.0, problem)


def _cases(operation: Operation[Any], size: Size, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """One case on a CPU; on a GPU more than its L2 cache holds."""
    bench, draw = BENCHES[operation.name], Draw(device, dtype, torch.Generator(device).manual_seed(1))
    cases = [bench.build(size, draw)]
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        more = min(_MOST_BUFFERS, -(-_CACHES * cache // max(1, cases[0].forward_bytes)))
        cases += [bench.build(size, draw) for _ in range(more)]
    return cases


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _functions(
    operation: Operation[Any], device: torch.device, dtype: torch.dtype, availability: Availability
) -> tuple[dict[str, Callable[..., Any] | None], dict[str, str]]:
    """Functions to measure, None for plain; and reasons for unavailable backends."""
    functions: dict[str, Callable[..., Any] | None] = {PLAIN: None}
    problems: dict[str, str] = {}
    for name in reversed(BACKENDS):
        implementation = operation.implementations.get(name)
        if implementation is None or implementation_problem(operation, name, device, dtype) is not None:
            continue
        if name in availability.missing:
            problems[name] = availability.missing[name]
        else:
            functions[name] = implementation.function
    return functions, problems


def _used(operation: Operation[Any], chosen: Backend, device: torch.device, case: Case) -> str:
    """Backend that ``auto`` uses at this size."""
    if not operation.is_small(chosen, device.type, case.arguments[0]):
        return chosen
    return "reference" if operation.small is None else SMALL


def _call(cases: Sequence[Case], function: Callable[..., Any] | None, plan: Plan) -> Callable[[], None]:
    """A call of forward and, if measured, backward on the next case in rotation."""
    grads: list[list[torch.Tensor]] = [[] for _ in cases]
    prepared = cycle([(case, _leaves(case.arguments), own) for case, own in zip(cases, grads, strict=True)])

    def call() -> None:
        case, leaves, own = next(prepared)
        results = (function or case.plain)(*case.arguments)
        outputs = [results] if isinstance(results, torch.Tensor) else list(results or ())
        outputs = [output for output in outputs if output.requires_grad]
        if not outputs or plan.forward_only:
            return
        if not own:
            own.extend(torch.rand_like(output) for output in outputs)
        torch.autograd.grad(outputs, leaves, own)

    return call


def _leaves(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in arguments if isinstance(value, torch.Tensor) and value.requires_grad]
