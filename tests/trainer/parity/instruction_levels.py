"""Levels of instruction sets at which parity is proved: those of torch, MKL, oneDNN and the native kernels together.

Each is chosen when a process first computes, by the variables of its environment; so a level has processes of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.ops.dispatch import library


@dataclass(frozen=True)
class InstructionLevel:
    """A level.

    Attributes:
        name: by which the command line calls it.
        torch: as torch.backends.cpu.get_cpu_capability() says.
        kernels: one of trainer.ops.dispatch.library.LEVELS.
        variables: of the environment, which bring the libraries down to it.
    """

    name: str
    torch: str
    kernels: str
    variables: Mapping[str, str]

    def __str__(self) -> str:
        return self.name


# MKL on a processor that is not Intel's knows two ways: the compatible one, and one for all that is newer.
LEVELS = (
    InstructionLevel(
        "portable",
        "DEFAULT",
        library.LEVELS[0],
        {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    ),
    InstructionLevel(
        "avx2",
        "AVX2",
        library.LEVELS[1],
        {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    ),
    InstructionLevel(
        "avx512",
        "AVX512",
        library.LEVELS[2],
        {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    ),
)


def offered() -> tuple[InstructionLevel, ...]:
    """The levels that this processor has, the best last."""
    names = [level.torch for level in LEVELS]
    best = torch.backends.cpu.get_cpu_capability()
    # Other processors name their own instruction sets; the portable level is everybody's.
    return LEVELS[: names.index(best) + 1] if best in names else LEVELS[:1]


def command_at(level: InstructionLevel, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """``python -m tests.parity`` with these arguments, on torch and on native kernels; and its environment."""
    command = [sys.executable, "-m", "tests.parity", *arguments, "--kernels", level.kernels]
    return command, {**os.environ, **level.variables}


def run_at_every_level(arguments: Sequence[str]) -> int:
    """``python -m tests.parity`` with these arguments at each level that there is; the worst exit status."""
    status = 0
    for level in LEVELS:
        has = level in offered()
        print(f"instruction level {level}{'' if has else ': not run, this processor lacks it'}", flush=True)
        if has:
            command, environment = command_at(level, arguments)
            status = max(status, subprocess.call(command, env=environment))
    return status
