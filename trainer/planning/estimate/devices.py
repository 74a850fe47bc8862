"""Devices by name: memory, speeds of data sheets, and the share of each that training reaches. Torch-free.

Sources: the vendors' data sheets (NVIDIA V100, A100, H100, H200, GH200, B200; AMD MI250X, one of its two dies), float32
without TF32, which the trainer leaves off. Memory is what the driver reports as usable. The shares of the H100 and
H200 are those of runs there (benchmarks/results/gpu-2026-11-26.md), of the V100 and A100 those of published runs
(benchmarks/planner_rows); the others are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Overhead:
    """Memory that a process takes beside the tensors of a step.

    Attributes:
        runtime: bytes of driver, kernels and workspaces.
        communicator: bytes of the buffers of one communicator.
        fragments: share of activations and logits that the allocator loses between blocks.
    """

    runtime: int
    communicator: int
    fragments: float


GPU_OVERHEAD = Overhead(int(0.9 * GIB), int(0.5 * GIB), 0.1)
"""Runtime and fragments are assumptions. About 0.5 GB a communicator: the web form of Fujii et al. 2024
(arXiv:2411.06465)."""
CPU_OVERHEAD = Overhead(int(0.3 * GIB), int(0.001 * GIB), 0.05)
"""A process that trains next to nothing takes 0.3 GiB alone, and 0.001 GiB more as one of two or four (measured with
glibc 2.36); fragments are an assumption."""
HOST_SECONDS = 0.45e-3
"""A GPT of 345M parameters with 4096 tokens took 38 ms for 24 layers on an H200, of which the GPU computed for half."""
MARGIN = 1.25
"""Memory that a device should have, by the predicted peak: the least with which no published run that failed is said
to fit, and above the 95th percentile of the residuals of own runs (benchmarks.planner_rows). Fujii et al. saw no run of
454 fail whose estimate was below 80% of the device either."""


@dataclass(frozen=True)
class Device:
    """One accelerator and its links.

    Attributes:
        name: as ``--device`` takes it.
        memory: usable bytes.
        peak: dense 16-bit operations per second of the data sheet.
        single: float32 operations per second of the data sheet.
        bandwidth: bytes per second of the device's memory.
        within: bytes per second and direction to another device of the node.
        between: bytes per second and direction to another node, per device.
        product_share: share of the peak that large matrix products reach.
        attention_share: share of the peak that wide heads reach in the fastest attention kernel of torch.
        flash_share: the same in version 2 of flash-attn.
        host: seconds that the host needs to start a layer's forward for one micro-batch; backward takes twice as long.
        overhead: memory of a process beside its tensors.
    """

    name: str
    memory: int
    peak: float
    single: float
    bandwidth: float
    within: float
    between: float
    product_share: float
    attention_share: float
    flash_share: float
    host: float
    overhead: Overhead

    @property
    def half_size(self) -> float:
        """Smallest size of a product at which it reaches half of what large ones do."""
        return 20.0 if self.name == "CPU" else 200.0

    @property
    def has_bf16(self) -> bool:
        """True if products in bf16 reach the speed of fp16."""
        return not self.name.startswith("V100")

    def rate(self, *, bf16: bool, fp16: bool) -> float:
        """Operations per second of the data sheet in a run's precision."""
        return self.peak if fp16 or (bf16 and self.has_bf16) else self.single


MEMORY_SHARE = 0.8
"""Share of the memory bandwidth that memory-bound ops reach."""
LINK_SHARE = 0.85
"""Share of a link's speed that large messages reach."""
HOST_LINK, HOST_BANDWIDTH = 20e9, 100e9
"""Bytes per second between a device and the CPUs' memory, and of a device's share of that memory. A Llama of 8B with
half of its states there, on an H200 with 16 cores, waited 0.9 s for the update."""


def _device(
    name: str,
    gib: float,
    tflops: tuple[float, float],
    gb: float,
    links: tuple[float, float],
    shares: tuple[float, float, float],
) -> Device:
    (peak, single), (within, between) = tflops, links
    speeds = (peak * 1e12, single * 1e12, gb * 1e9, within * 1e9, between * 1e9)
    is_cpu = name == "CPU"
    host, overhead = (0.0, CPU_OVERHEAD) if is_cpu else (HOST_SECONDS, GPU_OVERHEAD)
    return Device(name, int(gib * GIB), *speeds, *shares, host, overhead)


DEVICES = {
    device.name: device
    for device in (
        _device("V100-16GB", 15.7, (125.0, 15.7), 900, (150, 12.5), (0.77, 0.35, 0.35)),
        _device("V100-32GB", 31.7, (125.0, 15.7), 900, (150, 12.5), (0.77, 0.35, 0.35)),
        _device("A100-40GB", 39.4, (312.0, 19.5), 1555, (300, 25), (0.77, 0.5, 0.5)),
        _device("A100-80GB", 79.1, (312.0, 19.5), 2039, (300, 25), (0.77, 0.5, 0.5)),
        _device("H100", 79.1, (989.4, 66.9), 3350, (450, 50), (0.75, 0.5, 0.32)),
        _device("H200", 139.8, (989.4, 66.9), 4800, (450, 50), (0.75, 0.5, 0.32)),
        _device("GH200", 94.5, (989.4, 66.9), 4000, (450, 50), (0.75, 0.5, 0.32)),
        _device("B200", 178.3, (2250.0, 75.0), 8000, (900, 50), (0.75, 0.45, 0.15)),
        _device("MI250X", 63.9, (191.5, 23.9), 1638, (100, 12.5), (0.66, 0.35, 0.35)),
        _device("CPU", 16.0, (0.2, 0.2), 40, (5, 1), (0.80, 0.50, 0.50)),
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
