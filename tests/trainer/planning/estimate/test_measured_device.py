"""Speeds of a device from measurements, in the terms of its data sheet."""

from __future__ import annotations

from typing import Any, cast

import pytest

from trainer.config.records.measured_hardware import HardwareDocument
from trainer.planning.estimate.devices import DEVICES
from trainer.planning.estimate.links import Links
from trainer.planning.estimate.measured_device import is_of, measured_device

H100 = DEVICES["H100"]


def measurement(what: str, rate: float, **more: Any) -> dict[str, Any]:
    given = {"what": what, "dtype": "bfloat16", "shape": [], "bytes": None, "group": "device", "rate": rate}
    return {**given, "seconds": 1e-6, "ranks": 1, "work": rate * 1e-6, **more}


def document(*measurements: dict[str, Any], device: str = "NVIDIA H100 80GB HBM3") -> HardwareDocument:
    return cast("HardwareDocument", {"device": device, "measurements": list(measurements), "run_id": "bench-1"})


def test_each_speed_is_that_of_the_measurement() -> None:
    found = measured_device(
        H100,
        document(
            measurement("product", 500e12, shape=[4096, 4096, 4096]),
            measurement("product", 100e12, shape=[4096, 4096, 200]),
            measurement("product", 600e12, shape=[8192, 8192, 8192]),
            measurement("attention forward", 300e12, shape=[1, 16, 4096, 128]),
            measurement("copy", 2700e9, bytes=1 << 28),
            measurement("launch", 1e5, seconds=7.8e-6),
            measurement("all-gather", 1e9, group="node", bytes=1 << 16),
            measurement("all-gather", 340e9, group="node", bytes=1 << 27),
            measurement("all-gather", 42.5e9, group="one per node", bytes=1 << 27),
            measurement("all-reduce", 7.0, group="node", bytes=1 << 30),
        ),
    )
    # Half of the speed at a size of 200: shares of 0.53, 0.20 and 0.62 of the peak.
    assert found.product_share == pytest.approx(500 / 989.4 * 4296 / 4096)
    assert found.attention_share == pytest.approx(300 / 989.4 * 144 / 128)
    assert found.flash_share / found.attention_share == pytest.approx(H100.flash_share / H100.attention_share)
    assert (found.bandwidth, found.within, found.between) == pytest.approx((3000e9, 400e9, 50e9))
    assert found.host == pytest.approx(H100.host / 2)
    # Predicted messages of that size take the measured time.
    links = Links(8, found)
    assert links.collective(340e9, links.group((8, 1))) == pytest.approx(1, rel=0.001)


def test_what_was_not_measured_stays_as_it_was() -> None:
    assert measured_device(H100, document()) == H100
    cpu = DEVICES["CPU"]
    found = measured_device(cpu, document(measurement("launch", 1.0, seconds=1e-3), device="CPU"))
    assert found == cpu


def test_float32_is_compared_with_its_own_peak() -> None:
    one = measurement("product", 33.45e12, shape=[8192, 8192, 8192], dtype="float32")
    assert measured_device(H100, document(one)).product_share == pytest.approx(0.5 * 8392 / 8192)


@pytest.mark.parametrize(
    ("name", "device", "same"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("V100-16GB", "Tesla V100-SXM2-16GB", True),
        ("H200", "NVIDIA H100 80GB HBM3", False),
        ("GH200", "NVIDIA H200", False),
        ("CPU", "CPU", True),
        ("H100", "CPU", False),
    ],
)
def test_a_measurement_counts_for_its_kind_of_device(name: str, device: str, same: bool) -> None:
    assert is_of(DEVICES[name], document(device=device)) is same
