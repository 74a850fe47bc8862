"""GPUs of this machine."""

import shutil
from pathlib import Path

from llmctl.context import Context
from llmctl.errors import SchedulerError

_LOOK_TIMEOUT_S = 60.0
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(context: Context) -> tuple[str, ...]:
    """Ids of the GPUs that a job on this machine may use, in the syntax of CUDA_VISIBLE_DEVICES."""
    visible = context.environment.get("CUDA_VISIBLE_DEVICES")
    found = _installed_gpus(context)
    if visible is None:
        return found
    # CUDA stops at the first entry that names no device, so that -1 and NoDevFiles hide all devices:
    # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    listed = []
    for entry in (part.strip() for part in visible.split(",")):
        if not found or not (entry in found or entry.startswith(("GPU-", "MIG-"))):
            break
        listed.append(entry)
    return tuple(listed)


def _installed_gpus(context: Context) -> tuple[str, ...]:
    count = sum(1 for _ in _DRIVER.iterdir()) if _DRIVER.is_dir() else 0
    # Some containers hide the driver's folder while nvidia-smi works.
    if not count and shutil.which("nvidia-smi", path=context.environment.get("PATH")):
        try:
            answer = context.transport.run(["nvidia-smi", "-L"], timeout_s=_LOOK_TIMEOUT_S)
        except SchedulerError:
            return ()
        lines = answer.stdout.splitlines() if answer.exit_status == 0 else []
        count = sum(line.startswith("GPU ") for line in lines)
    return tuple(str(number) for number in range(count))
