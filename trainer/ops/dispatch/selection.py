"""Selection of a backend per operation, once per run and alike on all ranks.

A selected backend is requested by the config, available on this device, and correct in a self-test. A backend that
fails on one rank is excluded on all ranks, because ranks with different kernels would diverge.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.config.errors import ConfigError
from trainer.distributed.collectives import max_over_ranks
from trainer.ops.dispatch.registry import OPERATIONS, Kernels
from trainer.ops.dispatch.self_test import self_test
from trainer.ops.operation import BACKENDS, Backend, Operation

if TYPE_CHECKING:
    from trainer.planning.kernel_choice import RequestedBackend


@dataclass(frozen=True)
class Availability:
    """Backends that one rank can offer besides torch.

    Attributes:
        missing: backend -> reason and remedy, as one sentence.
        described: backend -> details for reports.
        in_cpu_memory: availability for the CPU computations of a run on a GPU; None: no such computations.
    """

    missing: Mapping[Backend, str]
    described: Mapping[Backend, str]
    in_cpu_memory: Availability | None = None


@dataclass(frozen=True)
class KernelSelection:
    """Result of the selection.

    Attributes:
        kernels: the selected functions.
        backends: operation -> backend, for the operations of the run.
        passed_over: operation -> preferred backends that are unusable, with reasons.
        described: backend -> details for reports.
        in_cpu_memory: selection for the CPU computations of a run on a GPU; None: no such computations.
        notes: further lines for the report.
    """

    kernels: Kernels
    backends: Mapping[str, Backend]
    passed_over: Mapping[str, Sequence[tuple[Backend, str]]]
    described: Mapping[Backend, str]
    in_cpu_memory: KernelSelection | None = None
    notes: Sequence[str] = ()

    @property
    def labels(self) -> dict[str, str]:
        """Operation -> backend with its details, to compare two attempts of a run."""
        own = {
            name: f"{backend} ({self.described[backend]})" if backend in self.described else backend
            for name, backend in self.backends.items()
        }
        there = {} if self.in_cpu_memory is None else self.in_cpu_memory.labels
        return own | {f"{name} in CPU memory": label for name, label in there.items()}

    def lines(self, where: str = "") -> list[str]:
        """Report lines: the selection, and each reason for a fallback.

        Args:
            where: text after the first word of each line.
        """
        parts = []
        for backend in BACKENDS:
            names = [name for name, used in self.backends.items() if used == backend]
            if names:
                more = f" ({self.described[backend]})" if backend in self.described else ""
                parts.append(f"{backend}{more} for {', '.join(names)}")
        lines = [f"kernels{where}: {'; '.join(parts)}"] if parts else []
        more_lines = [] if self.in_cpu_memory is None else self.in_cpu_memory.lines(" in CPU memory")
        return [*lines, *self.fallbacks(where), *more_lines, *self.notes]

    def fallbacks(self, where: str = "") -> list[str]:
        """One line for each reason for a fallback to a less preferred backend."""
        falls: dict[tuple[Backend, str], dict[str, Backend]] = {}
        for name, found in self.passed_over.items():
            for backend, problem in found:
                falls.setdefault((backend, problem), {})[name] = self.backends[name]
        return [
            f"kernels{where}: {', '.join(used)}: {' or '.join(dict.fromkeys(used.values()))} instead of "
            f"{backend}: {problem}"
            for (backend, problem), used in falls.items()
        ]


def choose_kernels(
    requested: Mapping[str, RequestedBackend],
    availability: Availability,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_alone: bool,
    agrees_on: torch.device | None = None,
) -> KernelSelection:
    """Choose the best requested backends that pass their self-test on every rank.

    Collective: all ranks of the job, unless ``is_alone``.

    Args:
        requested: operation -> requested backend; see trainer.planning.kernel_choice.
        availability: availability on this rank.
        device: device of the activations.
        dtype: dtype of the activations.
        is_alone: True for a single process without a job.
        agrees_on: device of the messages between ranks; None: ``device``.

    Raises:
        ConfigError: the config names a backend that is not available. Raised on all ranks.
    """
    operations = [operation for operation in OPERATIONS if operation.name in requested]
    candidates = {
        operation.name: _candidates(operation, requested[operation.name], device, dtype) for operation in operations
    }
    known = {operation.name: operation for operation in operations}
    chosen: dict[str, Backend] = {name: "reference" for name in candidates}
    reasons: dict[str, list[tuple[Backend, str]]] = {name: [] for name in candidates}
    # Rank by rank the same next candidate of every op, so that one message settles all ops of a round.
    while pending := {name: rest[0] for name, rest in candidates.items() if rest}:
        problems = {
            name: _problem(known[name], backend, availability, device, dtype) for name, backend in pending.items()
        }
        for name, problem in (problems if is_alone else agreed_problems(problems, agrees_on or device)).items():
            backend = candidates[name].pop(0)
            if problem is None:
                chosen[name] = backend
                candidates[name].clear()
            else:
                reasons[name].append((backend, problem))
    for name, found in reasons.items():
        if found and requested[name].backend != "auto":
            backend, problem = found[0]
            raise ConfigError(requested[name].key, f"{name} cannot run on {backend}: {problem}; or set it to auto")
    return KernelSelection(Kernels.of(chosen, device), chosen, reasons, availability.described)


def with_cpu_memory(
    selection: KernelSelection,
    requested: Mapping[str, RequestedBackend],
    availability: Availability,
    device: torch.device,
) -> KernelSelection:
    """Add the selection for float32 computations in CPU memory to that for a GPU.

    Collective: all ranks of the job.

    Args:
        selection: selection for ``device``.
        requested: operation -> requested backend in CPU memory; see trainer.planning.kernel_choice.
        availability: availability on this rank.
        device: device of the activations.

    Raises:
        ConfigError: see choose_kernels.
    """
    if not requested or availability.in_cpu_memory is None:
        return selection
    cpu = torch.device("cpu")
    there = choose_kernels(requested, availability.in_cpu_memory, cpu, torch.float32, is_alone=False, agrees_on=device)
    return replace(selection, kernels=Kernels.of(selection.backends, device, there.kernels), in_cpu_memory=there)


def implementation_problem(
    operation: Operation[Any], backend: Backend, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Reason why an operation lacks a backend on a kind of device, or None."""
    implementation = operation.implementations.get(backend)
    if implementation is None or device.type not in implementation.devices:
        return f"no implementation on {device.type}"
    if dtype not in implementation.dtypes:
        return f"{name_of(dtype)} is not supported"
    return None


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype in reports, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def _candidates(
    operation: Operation[Any], requested: RequestedBackend, device: torch.device, dtype: torch.dtype
) -> list[Backend]:
    """Backends to try before the reference, best first."""
    names = BACKENDS if requested.backend == "auto" else (requested.backend,)
    problems = {name: implementation_problem(operation, name, device, dtype) for name in names}
    if requested.is_named and requested.backend != "auto" and problems[requested.backend] is not None:
        there = [name for name in BACKENDS if implementation_problem(operation, name, device, dtype) is None]
        raise ConfigError(
            requested.key,
            f"{operation.name} cannot run on {requested.backend}: {problems[requested.backend]}; "
            f"use {' or '.join(there)}",
        )
    return [name for name in names if problems[name] is None and name != "reference"]


def _problem(
    operation: Operation[Any], backend: Backend, availability: Availability, device: torch.device, dtype: torch.dtype
) -> str | None:
    if backend in availability.missing:
        return availability.missing[backend]
    tested = self_test(operation, backend, device, dtype)
    if tested is None and dtype != torch.float32 and torch.float32 in operation.implementations[backend].dtypes:
        # A 16-bit model computes parts, such as a router or a loss, in float32.
        tested = self_test(operation, backend, device, torch.float32)
    return tested


def agreed_problems(problems: Mapping[str, str | None], device: torch.device) -> dict[str, str | None]:
    """Exchange problems: each problem of the lowest rank that has one, on all ranks.

    Collective: all ranks of the job.

    Args:
        problems: subject -> problem of this rank or None. The subjects are the same on all ranks.
        device: device of the messages between ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    marks = max_over_ranks([0.0 if problem is None else size - rank for problem in problems.values()], device)
    who = {name: size - int(mark) if mark else None for name, mark in zip(problems, marks, strict=True)}
    told: dict[int, dict[str, str | None]] = {}
    for source in sorted({source for source in who.values() if source is not None}):
        texts = [dict(problems)]
        if size > 1:
            dist.broadcast_object_list(texts, src=source, device=device)
        told[source] = texts[0]
    return {
        name: None if source is None else f"{told[source][name]}{f' (on rank {source})' if source else ''}"
        for name, source in who.items()
    }


def slow_processor(level: str) -> str | None:
    """Reason why native kernels are slower than torch on this processor, or None."""
    if level == "portable" and platform.machine() == "x86_64":
        return "this processor has no AVX2, and without AVX2 torch's operations are faster"
    return None
