"""Build the faulty kernels with the address sanitizer, and launch one.

Usage: ``... sanitized_launch NAME SIZE``, in a process that preloads the sanitizer's library.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda, build_emulation
from trainer.ops.build.build_settings import BuildSettings


class Faulty(ctypes.Structure):
    """Arguments of the kernels."""

    _fields_ = [("out", ctypes.c_void_p), ("in_", ctypes.c_void_p), ("size", ctypes.c_longlong)]


def main(name: str, size: int) -> None:
    """Launch with 32 threads."""
    kernels = Path(__file__).parent / "faulty_kernels.cu"
    settings = BuildSettings.from_variables(os.environ)
    cuda = EmulatedCuda(build_emulation(settings, "faulty_kernels", [kernels], "-fsanitize=address"))
    out = torch.zeros(64)
    cuda.launch(name, 32, Faulty(out.data_ptr(), out.data_ptr(), size))
    print("launched")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
