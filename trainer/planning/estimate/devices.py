"""Devices by name: memory, speeds of data sheets, and the share of each that training reaches. Torch-free.

Sources: the vendors' data sheets (NVIDIA V100, A100, H100, H200, GH200, B200; AMD MI250X, one of its two dies). Memory
is what the driver reports as usable. The shares are assumptions, not measurements of one machine.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """One accelerator and its links.

    Attributes:
        name: as ``--device`` takes it.
        memory: usable bytes.
        peak: dense 16-bit operations per second of the data sheet.
        bandwidth: bytes per second of the device's memory.
        within: bytes per second and direction to another device of the node.
        between: bytes per second and direction to another node, per device.
        product_share: share of the peak that large matrix products reach.
        attention_share: share of the peak that attention kernels reach.
    """

    name: str
    memory: int
    peak: float
    bandwidth: float
    within: float
    between: float
    product_share: float
    attention_share: float


MEMORY_SHARE = 0.8
"""Share of the memory bandwidth that memory-bound ops reach."""
LINK_SHARE = 0.75
"""Share of a link's speed that large messages reach."""


def _device(
    name: str, gib: float, tflops: float, gb: float, links: tuple[float, float], shares: tuple[float, float]
) -> Device:
    within, between = links
    return Device(name, int(gib * GIB), tflops * 1e12, gb * 1e9, within * 1e9, between * 1e9, *shares)


DEVICES = {
    device.name: device
    for device in (
        _device("V100-16GB", 15.7, 125.0, 900, (150, 12.5), (0.68, 0.30)),
        _device("V100-32GB", 31.7, 125.0, 900, (150, 12.5), (0.68, 0.30)),
        _device("A100-40GB", 39.4, 312.0, 1555, (300, 25), (0.66, 0.45)),
        _device("A100-80GB", 79.1, 312.0, 2039, (300, 25), (0.66, 0.45)),
        _device("H100", 79.1, 989.4, 3350, (450, 50), (0.68, 0.45)),
        _device("H200", 139.8, 989.4, 4800, (450, 50), (0.68, 0.45)),
        _device("GH200", 94.5, 989.4, 4000, (450, 50), (0.68, 0.45)),
        _device("B200", 178.3, 2250.0, 8000, (900, 50), (0.68, 0.40)),
        _device("MI250X", 63.9, 191.5, 1638, (100, 12.5), (0.60, 0.30)),
        _device("CPU", 16.0, 0.2, 40, (5, 1), (0.80, 0.50)),
    )
}


def find_device(name: str, memory_gib: float | None = None) -> Device | None:
    """The device called ``name``, of the memory nearest to ``memory_gib`` if several are; None: unknown."""
    wanted = name.upper().replace(" ", "-")
    found = [device for key, device in DEVICES.items() if key.upper() == wanted]
    found = found or [device for key, device in DEVICES.items() if key.upper().startswith(f"{wanted}-")]
    if memory_gib is not None:
        found.sort(key=lambda device: abs(device.memory - memory_gib * GIB))
    return found[0] if found else None
