"""Instruction-set levels of torch, MKL, oneDNN and the native kernels, for parity tests.

Environment variables choose the level when a process first computes. So each level needs separate processes.
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
        name: on the command line.
        torch: value of torch.backends.cpu.get_cpu_capability().
        kernels: one of trainer.ops.dispatch.library.LEVELS.
        variables: environment variables that restrict the libraries to the level.
    """

    name: str
    torch: str
    kernels: str
    variables: Mapping[str, str]

    def __str__(self) -> str:
        return self.name


# On other processors than Intel's, MKL has two code paths: a compatible one, and one for all newer levels.
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
    """Levels of this processor, the best last."""
    names = [level.torch for level in LEVELS]
    best = torch.backends.cpu.get_cpu_capability()
    # Other processors name their own instruction sets; the portable level is everybody's.
    return LEVELS[: names.index(best) + 1] if best in names else LEVELS[:1]


def command_at(level: InstructionLevel, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command ``python -m tests.parity`` for torch and native kernels, and its environment."""
    command = [sys.executable, "-m", "tests.parity", *arguments, "--kernels", level.kernels]
    return command, {**os.environ, **level.variables}


def run_at_every_level(arguments: Sequence[str]) -> int:
    """Run ``python -m tests.parity`` at each level of this processor.

    Returns the worst exit status.
    """
    status = 0
    for level in LEVELS:
        has = level in offered()
        print(f"instruction level {level}{'' if has else ': not run, this processor lacks it'}", flush=True)
        if has:
            command, environment = command_at(level, arguments)
            status = max(status, subprocess.call(command, env=environment))
    return status
