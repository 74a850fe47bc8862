"""``python -m trainer kernels doctor``: backend of every operation, and reasons for fallbacks."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from trainer.config.records.json_text import json_text
from trainer.ops.build.build import Compiler, find_compiler
from trainer.ops.build.build_settings import BuildError, outcome_of
from trainer.ops.build.nvcc import find_nvcc
from trainer.ops.build.nvrtc import find_nvrtc
from trainer.ops.dispatch.library import LEVELS, Library, load_built
from trainer.ops.dispatch.registry import OPERATIONS
from trainer.ops.dispatch.selection import choose_kernels, implementation_problem, name_of
from trainer.ops.dispatch.setup import KernelSetup
from trainer.planning.kernel_choice import RequestedBackend

if TYPE_CHECKING:
    from trainer.ops.build.build_settings import BuildSettings

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Part:
    """A prerequisite of the kernels, such as a compiler.

    Attributes:
        name: name of the prerequisite.
        found: True if it was found.
        detail: version and location, or the problem and its remedy.
    """

    name: str
    found: bool
    detail: str


@dataclass(frozen=True)
class Row:
    """Backend of one operation on one device in one dtype.

    Attributes:
        device: device type.
        dtype: dtype of the activations.
        operation: name of the operation.
        backend: the choice of ``auto``.
        reason: reasons against the backends before it in BACKENDS; empty if it is the first.
    """

    device: str
    dtype: str
    operation: str
    backend: str
    reason: str


def main(arguments: Sequence[str], settings: BuildSettings) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer kernels doctor",
        description="Show the backend of every operation here, by device and dtype, and the reasons for fallbacks.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    parts, rows = _parts(settings), list(_rows(settings))
    if options.json:
        document = {
            "python": sys.executable,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "parts": [asdict(part) for part in parts],
            "operations": [asdict(row) for row in rows],
        }
        print(json_text(document, indent=1))
        return 0
    for part in parts:
        print(f"{'ok' if part.found else 'missing':8} {part.name:9} {part.detail}")
    for device in dict.fromkeys(row.device for row in rows):
        print(f"\n{_table([row for row in rows if row.device == device])}")
    return 0


def _instruction_set(library: Library) -> str:
    """Instruction set of the CPU kernels here, and the reason for a low one."""
    processors = library.processor_level()
    if LEVELS.index(library.level) < LEVELS.index(processors):
        return f"on {library.level} here: its compiler does not support {processors}, which this processor has"
    best = library.level == LEVELS[-1] or platform.machine() != "x86_64"
    return f"on {library.level} here{'' if best else ', the best that this processor has'}"


def _parts(settings: BuildSettings) -> list[Part]:
    packages = [Path(torch.__file__).parents[1]]
    nvrtc = ", ".join(f"{found} at {found.path}" for found in find_nvrtc(packages, settings.cuda_folders))
    return [
        _part("compiler", partial(find_compiler, settings.compilers), _at),
        _part("library", partial(load_built, settings), lambda it: f"{it.path}, {_instruction_set(it)}"),
        _part("nvcc", partial(find_nvcc, packages, settings.cuda_folders), lambda it: f"{it} at {it.path}"),
        Part("NVRTC", bool(nvrtc), nvrtc or "not found; torch for CUDA includes it"),
    ]


def _at(compiler: Compiler) -> str:
    return f"{compiler.version} at {' '.join(compiler.command)}"


def _part(name: str, find: Callable[[], _Found], detail: Callable[[_Found], str]) -> Part:
    found = outcome_of(find)
    return Part(name, False, found.reason) if isinstance(found, BuildError) else Part(name, True, detail(found))


def _rows(settings: BuildSettings) -> Iterator[Row]:
    requested = {operation.name: RequestedBackend("auto", "training.kernel_backend", False) for operation in OPERATIONS}
    devices = [torch.device("cpu")] + ([torch.device("cuda", 0)] if torch.cuda.is_available() else [])
    for device in devices:
        availability = KernelSetup(settings, device).availability(requested)
        for dtype in _DTYPES:
            selection = choose_kernels(requested, availability, device, dtype, is_alone=True)
            for operation in OPERATIONS:
                reasons = dict(selection.passed_over[operation.name])
                lacking = implementation_problem(operation, "native", device, dtype)
                reasons |= {} if lacking is None else {"native": lacking}
                text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
                yield Row(device.type, name_of(dtype), operation.name, selection.backends[operation.name], text)


def _table(rows: Sequence[Row]) -> str:
    """Table of operations by dtypes, followed by each reason once."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    cells = {(row.operation, row.dtype): row.backend for row in rows}
    table = [(rows[0].device, *dtypes)]
    for operation in dict.fromkeys(row.operation for row in rows):
        table.append((operation, *(cells[operation, dtype] for dtype in dtypes)))
    width = 2 + max(len(text) for line in table for text in line)
    lines = ["".join(f"{text:{width}}" for text in line).rstrip() for line in table]
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.reason:
            reasons.setdefault(row.reason, {})[row.operation] = None
    lines += [f"{', '.join(operations)}: {reason}" for reason, operations in reasons.items()]
    return "\n".join(lines)
