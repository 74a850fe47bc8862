"""Which NVIDIA GPUs this machine offers, found without torch."""

import shutil
from pathlib import Path

from llmctl.context import Context
from llmctl.errors import SchedulerError

_DRIVER = Path("/proc/driver/nvidia/gpus")
_TIMEOUT_S = 20


def visible_gpus(context: Context) -> tuple[str, ...]:
    """Ids of the GPUs that a job started from here may use, as CUDA_VISIBLE_DEVICES takes them."""
    visible = context.environment.get("CUDA_VISIBLE_DEVICES")
    found = _installed_gpus(context)
    if visible is None:
        return found
    # CUDA stops at the first entry that names no device, which is how -1 and NoDevFiles hide all of them:
    # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    listed = []
    for entry in (part.strip() for part in visible.split(",")):
        if not found or not (entry in found or entry.startswith(("GPU-", "MIG-"))):
            break
        listed.append(entry)
    return tuple(listed)


def _installed_gpus(context: Context) -> tuple[str, ...]:
    count = sum(1 for _ in _DRIVER.iterdir()) if _DRIVER.is_dir() else 0
    # In some containers the driver's folder is hidden while its program works.
    if not count and shutil.which("nvidia-smi", path=context.environment.get("PATH")):
        try:
            answer = context.transport.run(["nvidia-smi", "-L"], timeout_s=_TIMEOUT_S)
        except SchedulerError:
            return ()
        lines = answer.stdout.splitlines() if answer.exit_status == 0 else []
        count = sum(line.startswith("GPU ") for line in lines)
    return tuple(str(number) for number in range(count))
