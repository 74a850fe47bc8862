"""The table of measured hardware: each measurement, and its share of the data sheet. Pure."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainer.config.records.measured_hardware import HardwareDocument, Measurement
from trainer.planning.estimate.devices import DEVICES, GIB, Device, find_device

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile

_HEAD = ("MEASUREMENT", "SIZE", "GROUP", "TIME", "RATE", "OF DATA SHEET")
_COMPUTING = ("product", "attention forward", "attention backward")
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_MOST_HOSTS = 8
_SLOWER = 1.15
"""Time of the slowest device by the median above which it is told: below 0.85 of the speed, as in a preflight."""


def data_sheet(document: HardwareDocument, profile: "ClusterProfile", resource_type: str | None) -> Device | None:
    """The data sheet of the devices: that of the profile's GPU, else by the measured name. None: unknown, or CPUs.

    Args:
        document: the measurement.
        profile: of the cluster.
        resource_type: kind of node that was asked for; None: the profile's.
    """
    if document["device"] == "CPU":
        return None
    kind = profile.resource_types.get(resource_type or profile.defaults.resource_type or "")
    if kind is not None and kind.gpu is not None:
        return find_device(kind.gpu, kind.gpu_memory_gib)
    words, memory = document["device"].replace("-", " ").split(), document["device_memory_bytes"]
    name = next((name for name in DEVICES if name.partition("-")[0] in words), None)
    return find_device(name.partition("-")[0], memory / GIB if memory is not None else None) if name else None


def table_lines(document: HardwareDocument, device: Device | None) -> Iterator[str]:
    """Lines of the table, with a head on the cluster and a remark on the slowest device.

    Args:
        document: the measurement.
        device: data sheet; None leaves its column empty.
    """
    nodes, each = document["nodes"], document["devices_per_node"]
    size = f"{nodes} {'node' if nodes == 1 else 'nodes'} x {each} {document['device']}"
    software = f"torch {document['torch']}" + (f", CUDA {document['cuda']}" if document["cuda"] else "")
    yield f"{document['cluster']}: {size}, {software}, {document['backend']}"
    names, more = document["hosts"][:_MOST_HOSTS], nodes - _MOST_HOSTS
    hosts = ", ".join(names) + (f" and {more} more" if more > 0 else "")
    yield f"{hosts}; {document['date']}, run {document['run_id']}"
    rows = [_HEAD, *(_row(one, device, each) for one in document["measurements"])]
    if device is None:
        rows = [row[:-1] for row in rows]
    yield from _aligned(rows)
    if device is not None:
        yield f"data sheet: {device.name}, {device.peak / 1e12:.4g} TFLOP/s"
    worst = max(document["measurements"], key=_delay, default=None)
    # Other work on a machine slows a CPU for a moment, which says nothing of the machine.
    if worst is not None and _delay(worst) > _SLOWER and document["device"] != "CPU":
        yield f"{worst['slowest_host']} takes {_delay(worst):.2f} times as long as the median for {worst['what']}"


def share_of(one: Measurement, device: Device, devices_per_node: int) -> float | None:
    """Share of the data sheet that a measurement reaches; None for a launch.

    A message through all ranks of several nodes uses all their adapters, but no faster than a link within the node.
    """
    whole: dict[str, float] = {
        "node": device.within,
        "one per node": device.between,
        "all": min(device.within, device.between * devices_per_node),
    }
    if one["what"] in _COMPUTING:
        return one["rate"] / (device.single if one["dtype"] == "float32" else device.peak)
    if one["what"] == "copy":
        return one["rate"] / device.bandwidth
    return one["rate"] / whole[one["group"]] if one["group"] in whole else None


def _row(one: Measurement, device: Device | None, devices_per_node: int) -> tuple[str, ...]:
    share = share_of(one, device, devices_per_node) if device is not None else None
    size = " x ".join(str(number) for number in one["shape"]) or _bytes(one["bytes"])
    group = "device" if one["group"] == "device" else f"{one['group']} ({one['ranks']} ranks)"
    return one["what"], size, group, _time(one["seconds"]), _rate(one), f"{share:.0%}" if share is not None else ""


def _delay(one: Measurement) -> float:
    return one["slowest_seconds"] / one["seconds"] if one["group"] == "device" and one["what"] != "launch" else 0.0


def _rate(one: Measurement) -> str:
    if one["what"] == "launch":
        return ""
    scale, letter = next((pair for pair in _SCALES if one["rate"] >= pair[0]), (1.0, ""))
    return f"{one['rate'] / scale:.3g} {letter}{'FLOP/s' if one['what'] in _COMPUTING else 'B/s'}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def _bytes(size: int | None) -> str:
    if size is None:
        return ""
    unit, name = next((pair for pair in ((1 << 20, "MiB"), (1 << 10, "KiB")) if size >= pair[0]), (1, "bytes"))
    return f"{size / unit:.4g} {name}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
