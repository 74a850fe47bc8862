"""The index of torch's wheels that run on the GPUs and with the driver of a cluster's nodes. Pure.

Sources:
    [IDX]  https://pytorch.org/get-started/locally/ and /previous-versions/: one index for each CUDA and ROCm version
    [ARCH] https://github.com/pytorch/pytorch/issues/157517 and the notes of torch 2.11: the wheels for CUDA 12.8 and
           later begin at compute capability 7.5; those for CUDA 12.6 have 5.0 to 9.0, so V100's 7.0
    [DRV]  https://docs.nvidia.com/deploy/cuda-compatibility/: the oldest driver of each CUDA major version
"""

from collections.abc import Mapping
from dataclasses import dataclass

# https://developer.nvidia.com/cuda-gpus and https://rocm.docs.amd.com (GPU hardware specifications).
ARCHITECTURES = {
    "V100": "7.0",
    "T4": "7.5",
    "A100": "8.0",
    "A40": "8.6",
    "L40S": "8.9",
    "H100": "9.0",
    "H200": "9.0",
    "GH200": "9.0",
    "B200": "10.0",
    "GB200": "10.0",
    "B300": "10.3",
    "MI250X": "gfx90a",
    "MI300A": "gfx942",
    "MI300X": "gfx942",
}
"""Common GPU name -> compute capability, or AMD's architecture name."""
OLDEST_DRIVER = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}
"""CUDA major version -> the oldest driver that runs its programs [DRV]."""
_INDEX = "https://download.pytorch.org/whl/"
ROCM_INDEX = f"{_INDEX}rocm7.1"
"""Index of the wheels for AMD's GPUs [IDX]."""


@dataclass(frozen=True)
class CudaWheels:
    """The wheels of one index.

    Attributes:
        name: of the index, as in its address.
        oldest, newest: compute capabilities (major, minor) of its machine code [ARCH].
        driver: the oldest driver that runs them [DRV].
    """

    name: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    driver: str


# In order of preference while the driver is unknown: CUDA 12.8 runs with every driver of CUDA 12, on 7.5 to 12.0.
CUDA_WHEELS = (
    CudaWheels("cu128", (7, 5), (12, 0), OLDEST_DRIVER["12"]),
    CudaWheels("cu126", (5, 0), (9, 0), OLDEST_DRIVER["12"]),
    CudaWheels("cu130", (7, 5), (12, 1), OLDEST_DRIVER["13"]),
)


@dataclass(frozen=True)
class TorchIndex:
    """An index for pip, and why.

    Attributes:
        url: of the index.
        reason: for people, such as ``V100 (7.0)``.
    """

    url: str
    reason: str


def choose_index(gpus: Mapping[str, str | None], driver: str | None = None) -> TorchIndex | None:
    """The index whose torch runs on all of these GPUs; None if no index does.

    Args:
        gpus: name -> architecture as in ARCHITECTURES; unknown ones do not count. Empty: nodes without GPUs.
        driver: version of the nodes' driver; None if unknown.
    """
    if not gpus:
        return TorchIndex(f"{_INDEX}cpu", "nodes without GPUs")
    reason = ", ".join(f"{gpu} ({level})" if level else gpu for gpu, level in sorted(gpus.items()))
    levels = [level for level in gpus.values() if level]
    if any(level.startswith("gfx") for level in levels):
        return TorchIndex(ROCM_INDEX, reason)
    is_new = driver is not None and _numbers(driver) >= _numbers(OLDEST_DRIVER["13"])
    for wheels in sorted(CUDA_WHEELS, key=lambda wheels: is_new and wheels.name != "cu130"):
        has_driver = driver is None or _numbers(driver) >= _numbers(wheels.driver)
        if has_driver and all(wheels.oldest <= _numbers(level) <= wheels.newest for level in levels):
            return TorchIndex(f"{_INDEX}{wheels.name}", reason + (f", driver {driver}" if driver else ""))
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def is_amd(gpu: str | None) -> bool:
    """True if a GPU, by its common name, is AMD's."""
    return ARCHITECTURES.get(gpu or "", "").startswith("gfx")
