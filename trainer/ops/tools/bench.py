"""Measuring operations: every backend that is there beside the same in plain torch, against the memory's own speed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from trainer.ops.bench_case import Bench, Case, Draw, Size
from trainer.ops.dispatch.registry import OPERATIONS
from trainer.ops.dispatch.selection import choose_kernels, implementation_problem, name_of
from trainer.ops.dispatch.setup import KernelSetup
from trainer.ops.dispatch.tuning import rank
from trainer.ops.operation import BACKENDS, Backend, Operation
from trainer.planning.kernel_choice import RequestedBackend

if TYPE_CHECKING:
    from trainer.ops.build.build_settings import BuildSettings
    from trainer.ops.dispatch.selection import Availability

BENCHES: Mapping[str, Bench] = {
    operation.name: operation.bench for operation in OPERATIONS if operation.bench is not None
}
"""Operation -> how it is measured."""
PLAIN = "plain"
SMALL = "small"
_SAMPLE_S = 0.005
"""Shorter calls are measured several at a time."""
_MOST_BUFFERS = 64
_CACHES = 2
"""Buffers of a GPU are taken in turn until they fill its L2 so many times, so that none is still there."""
_LARGE = 1 << 20
"""Elements, about: so many take a CPU longer than a call, but not a GPU."""
_TIMES_FOR_GPU = 8
"""As many times as much takes a GPU longer too: of 4096 x 4096 bfloat16 it has done before Python has called it."""
_AUTO = RequestedBackend("auto", "training.kernel_backend", False)


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        repeats: samples, of which the median counts.
        copy_mib: size of the copied tensor; beyond the caches.
        by_cpu_time: count the calling thread's CPU time, where other work makes that of the clock useless.
        forward_only: leave backward out.
        compiles: also measure the backend ``compile``, which takes seconds for each size.
    """

    repeats: int = 7
    copy_mib: int = 256
    by_cpu_time: bool = False
    forward_only: bool = False
    compiles: bool = False


@dataclass(frozen=True)
class Measurement:
    """One backend of one operation at one size; ``plain`` is what users write in torch.

    ``small`` is what takes the place of a kernel at a size for which calling one costs more than it saves.

    Attributes:
        device: its type.
        dtype: of the activations.
        operation: its name.
        size: of the arguments: see the operation's bench.
        backend: what was measured.
        is_chosen: whether ``auto`` takes it here, at this size.
        seconds: median of a call, with its backward if it has one and that is wanted.
        gb_per_s: counted bytes by time.
        of_copy: that by the speed of a copy.
        of_reference: how many times as fast as reference.
        of_plain: how many times as fast as plain.
        problem: why it could not be measured; empty if it was, and the figures are zeros if not.
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
    """Times calls on a device."""

    def __init__(self, device: torch.device, plan: Plan) -> None:
        self._is_cuda = device.type == "cuda"
        self._clock = time.thread_time if plan.by_cpu_time else time.perf_counter

    def seconds(self, call: Callable[[], object], times: int) -> float:
        """Of one call, on the average of several in a row."""
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
        """Of every call, the samples of all taken in turn: a slow moment of the machine meets them all."""
        times = {}
        for name, call in calls.items():
            call()  # Once for what is made at the first call.
            times[name] = max(1, int(_SAMPLE_S / max(self.seconds(call, 1), 1e-7)))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                if times[name] > 1:
                    call()  # Or the caches would hold what the one before ran, which may be the same and may not.
                samples[name].append(self.seconds(call, times[name]))
        return {name: statistics.median(found) for name, found in samples.items()}


def copy_speed(device: torch.device, plan: Plan) -> float:
    """Bytes per second, read and written, of the copy of one tensor to another."""
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
        requested: operation -> its sizes; none: the usual ones of its bench.
        device: where.
        dtypes: of the activations.
        plan: how.
        settings: where built kernels are.
        copy_bytes_per_s: what their speed is compared with.
    """
    operations = [operation for operation in OPERATIONS if operation.name in requested]
    auto = {operation.name: _AUTO for operation in operations}
    availability = KernelSetup(settings, device).availability(auto)
    for dtype in dtypes:
        chosen = choose_kernels(auto, availability, device, dtype, is_alone=True).backends
        for operation in operations:
            rows: list[Measurement] = []
            for size in requested[operation.name] or usual_sizes(BENCHES[operation.name], device):
                rows += _measure_case(
                    operation, size, device, dtype, plan, availability, chosen[operation.name], copy_bytes_per_s
                )
            yield from rows if plan.forward_only else _ranked(operation, rows, availability, device, dtype)


def usual_sizes(bench: Bench, device: torch.device) -> list[Size]:
    """The sizes of a bench, of which on a GPU the large ones are larger."""
    times = _TIMES_FOR_GPU if device.type == "cuda" else 1
    return [(times * size[0], *size[1:]) if math.prod(size) >= _LARGE else size for size in bench.sizes]


def _ranked(
    operation: Operation[Any],
    rows: Sequence[Measurement],
    availability: Availability,
    device: torch.device,
    dtype: torch.dtype,
) -> Sequence[Measurement]:
    """The same, chosen on a GPU by what these very measurements say."""
    ranking = rank([asdict(row) for row in rows]) if device.type == "cuda" else None
    if ranking is None:
        return rows
    knowing = replace(availability, rankings={(operation.name, name_of(dtype)): ranking})
    chosen = choose_kernels({operation.name: _AUTO}, knowing, device, dtype, is_alone=True).backends[operation.name]
    return [replace(row, is_chosen=row.backend == chosen) for row in rows]


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
    except (RuntimeError, TypeError) as error:  # such as memory that is too small, or sizes that are no int64
        yield Measurement(*row, PLAIN, False, 0.0, 0.0, 0.0, 0.0, 0.0, _first_line(error))
        return
    functions, problems = _functions(operation, device, dtype, availability)
    if plan.compiles:
        torch.compiler.reset()  # Or torch gives up after so many sizes of one function.
    else:
        functions.pop("compile", None)
    moved_bytes = cases[0].forward_bytes + (0 if plan.forward_only else cases[0].backward_bytes)
    used = _used(operation, chosen, device, cases[0])
    if used == SMALL:
        functions[SMALL] = operation.small
    calls = {name: _call(cases, function, plan) for name, function in functions.items()}
    for name in list(calls):
        try:
            for _ in cases:
                calls[name]()
        except RuntimeError as error:  # such as memory that is too small for one of them
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
    """One, or on a GPU as many as its caches do not hold."""
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
    """What to measure, None for plain; and why not what an operation has, but not here."""
    functions: dict[str, Callable[..., Any] | None] = {PLAIN: None}
    problems: dict[str, str] = {}
    for name in reversed(BACKENDS):
        implementation = operation.implementations.get("native" if name == "nvrtc" else name)
        if implementation is None or implementation_problem(operation, name, device, dtype) is not None:
            continue
        if name in availability.missing:
            problems[name] = availability.missing[name]
        else:
            functions[name] = implementation.function
    return functions, problems


def _used(operation: Operation[Any], chosen: Backend, device: torch.device, case: Case) -> str:
    """What ``auto`` comes to at this size."""
    if not operation.is_small(chosen, device.type, case.arguments[0]):
        return chosen
    return "reference" if operation.small is None else SMALL


def _call(cases: Sequence[Case], function: Callable[..., Any] | None, plan: Plan) -> Callable[[], None]:
    """Forward and, where there is one and it is wanted, backward, on the next of the cases at each call."""
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
