"""A device with the speeds that ``llmctl env bench`` has measured, in the place of its data sheet's. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from trainer.planning.estimate.devices import HOST_SECONDS, LINK_SHARE
from trainer.planning.estimate.layer_time import HALF_HEAD, share_of

if TYPE_CHECKING:
    from trainer.config.records.measured_hardware import HardwareDocument, Measurement
    from trainer.planning.estimate.devices import Device

_COPY_SHARE = 0.9
"""Share of the data sheet's bandwidth that a large copy reaches: 3,021 of 3,350 GB/s on an H100."""
_LAUNCH_S = 15.6e-6
"""Start of a small operation on the machine of HOST_SECONDS."""


def measured_device(device: Device, document: HardwareDocument) -> Device:
    """``device`` with measured speeds; what was not measured stays as it was."""
    measurements = document["measurements"]
    attention = _share(measurements, "attention forward", device) or device.attention_share
    launches = [one["seconds"] for one in measurements if one["what"] == "launch"]
    return replace(
        device,
        product_share=_share(measurements, "product", device) or device.product_share,
        attention_share=attention,
        flash_share=device.flash_share * attention / device.attention_share,
        bandwidth=_largest(measurements, "copy", "device", _COPY_SHARE) or device.bandwidth,
        within=_largest(measurements, "all-gather", "node", LINK_SHARE) or device.within,
        # Each rank of "one per node" has an adapter of its own, while the others are silent.
        between=_largest(measurements, "all-gather", "one per node", LINK_SHARE) or device.between,
        host=HOST_SECONDS * median(launches) / _LAUNCH_S if launches and device.host else device.host,
    )


def is_of(device: Device, document: HardwareDocument) -> bool:
    """True if the measured device is of the kind of ``device``."""
    words = document["device"].replace("-", " ").split()
    return device.name.partition("-")[0] in words


def _share(measurements: list[Measurement], what: str, device: Device) -> float | None:
    """Share of the peak that large sizes reach, by all measured sizes; None: nothing was measured."""
    found = list(_shares(measurements, what, device))
    return median(found) if found else None


def _shares(measurements: list[Measurement], what: str, device: Device) -> Iterator[float]:
    for one in measurements:
        if one["what"] != what:
            continue
        peak = device.rate(bf16=one["dtype"] == "bfloat16", fp16=False)
        size = (
            share_of(one["shape"][-1], HALF_HEAD)
            if what != "product"
            else share_of(min(one["shape"]), device.half_size)
        )
        yield one["rate"] / peak / size


def _largest(measurements: list[Measurement], what: str, group: str, share: float) -> float | None:
    """Bytes per second of the data sheet of which the largest size reaches ``share``; None: nothing was measured."""
    found = [one for one in measurements if (one["what"], one["group"]) == (what, group)]
    largest = max(found, key=lambda one: one["bytes"] or 0, default=None)
    return None if largest is None else largest["rate"] / share
