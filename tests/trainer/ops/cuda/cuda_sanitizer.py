"""``python -m tests.trainer.ops.cuda.cuda_sanitizer``: run compute-sanitizer on a GPU.

Runs memcheck, racecheck, initcheck and synccheck over the operations' tests of small shapes. The exit code is 1 if a
tool finds a problem. https://docs.nvidia.com/compute-sanitizer/
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.trainer.ops.cuda.test_cuda_ops import OPERATIONS

_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_FOUND = 9
# Tests of large shapes, and tests without kernels.
_LEFT_OUT = ("8191", "finite_differences", "schemas", "refused")


def main() -> int:
    """Run the tools one after another."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        print("compute-sanitizer was not found; it comes with the CUDA toolkit", file=sys.stderr)
        return 1
    here = Path(__file__).parent
    tests = [str(here / f"test_{operation}.py") for operation in OPERATIONS]
    # Without torch's caching allocator, memcheck knows the bounds of every tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for tool in _TOOLS:
        command = [
            *(sanitizer, "--tool", tool, "--error-exitcode", str(_FOUND), "--target-processes", "all"),
            *(sys.executable, "-m", "pytest", "-p", "tests.trainer.ops.tools.gpu_plugin", "--no-header", "-q"),
            *("-k", " and ".join(f"not {word}" for word in _LEFT_OUT), *tests),
        ]
        done = subprocess.run(command, check=False, cwd=here.parents[3], env=environment)
        print(f"{tool}: {'nothing found' if done.returncode == 0 else f'exit code {done.returncode}'}", flush=True)
        failed += [tool] if done.returncode else []
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
