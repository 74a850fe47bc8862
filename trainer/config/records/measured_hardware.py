"""The document of measured hardware, ``hardware.json``: ``python -m trainer bench`` writes it, llmctl keeps it."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

HARDWARE = "hardware.json"
"""Name of the file in the run directory."""
SCHEMA = 1
"""Version of the format."""

What = Literal[
    "product",
    "attention forward",
    "attention backward",
    "copy",
    "launch",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "send",
]
Group = Literal["device", "node", "one per node", "all"]


class Measurement(TypedDict):
    """One measurement. Times are medians: over repetitions, then over the devices or groups that measured alike."""

    what: What
    """A product is x [m, k] times the transpose of w [n, k]. A copy is within a device's memory. A launch is the start
    of a small operation from the host. In a send, each rank of a ring sends to the next one."""
    dtype: str
    """Type of the elements: bfloat16 or float32."""
    shape: list[int]
    """Of a product m, n and k; of causal attention batch, heads, tokens and width of a head; else empty."""
    bytes: int | None
    """Size of the copied buffer or of the message, of all-gather and reduce-scatter of the whole buffer; else null."""
    group: Group
    """Ranks that take part: one device alone, while all others measure the same; those of one node; one of each node;
    all."""
    ranks: int
    """Number of ranks of the group."""
    work: float
    """Operations of a product or of attention, of which the causal half counts; bytes read and written by a copy; bytes
    over the bus of each rank, as nccl-tests count them; 1 for a launch."""
    seconds: float
    """Time. Of a group that of its slowest rank."""
    rate: float
    """Work per second."""
    slowest_seconds: float
    """Time of the slowest device or group."""
    slowest_host: str
    """Its host; of a group that of its first rank."""
    repetitions: int
    """Repetitions whose median counts, each of one or more calls."""


class HardwareDocument(TypedDict):
    """Measured speed of a cluster's devices and of the links between them."""

    schema: int
    """Version of the format."""
    date: str
    """Time of the measurement in UTC, as ISO 8601."""
    cluster: str
    """Name of the profile."""
    run_id: str
    """The run that measured."""
    device: str
    """Name of the device, as its driver reports it; CPU without a GPU."""
    device_memory_bytes: int | None
    """Memory of the smallest device; null without GPUs."""
    torch: str
    """Version of torch."""
    cuda: str | None
    """Version of CUDA or ROCm of torch; null for a torch without either."""
    backend: str
    """Library of the messages: nccl or gloo."""
    nodes: int
    """Number of nodes."""
    devices_per_node: int
    """Devices of each node, one rank each."""
    hosts: list[str]
    """Names of the nodes, in the order of their ranks."""
    measurements: list[Measurement]
    """The measurements."""
