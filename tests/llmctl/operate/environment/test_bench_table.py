"""The table of measured hardware: shares of the data sheet, units, and the slowest device. Pure."""

import os

import pytest

from llmctl.operate.environment.bench_table import data_sheet, share_of, table_lines
from llmctl.paths import UserFolders
from llmctl.site.profile import load_profile
from trainer.planning.estimate.devices import DEVICES


def measurement(what="product", rate=1.0, group="device", dtype="bfloat16", **more):
    found = {"what": what, "dtype": dtype, "shape": [], "bytes": None, "group": group, "ranks": 1, "work": 1.0}
    times = {"seconds": 1e-5, "slowest_seconds": 1e-5, "slowest_host": "n1", "repetitions": 3}
    return {**found, **times, "rate": rate, **more}


def document(*measurements, device="NVIDIA H200", memory=141 << 30):
    found = {"schema": 1, "date": "2026-11-29T00:00:00+00:00", "cluster": "lab", "run_id": "bench-lab-1"}
    software = {"torch": "2.13.0", "cuda": "13.0", "backend": "nccl"}
    size = {"nodes": 2, "devices_per_node": 8, "hosts": ["n1", "n2"]}
    about = {"device": device, "device_memory_bytes": memory}
    return {**found, **about, **software, **size, "measurements": [*measurements]}


@pytest.mark.parametrize(
    ("one", "share"),
    [
        (measurement(rate=494.7e12), 0.5),
        (measurement("attention backward", rate=33.45e12, dtype="float32"), 0.5),
        (measurement("copy", rate=2.4e12), 0.5),
        (measurement("all-reduce", rate=225e9, group="node"), 0.5),
        (measurement("send", rate=25e9, group="one per node"), 0.5),
        # Eight adapters of 50 GB/s are below a link of 450 GB/s.
        (measurement("all-gather", rate=200e9, group="all"), 0.5),
        (measurement("launch", rate=1e5), None),
    ],
)
def test_shares_are_those_of_the_data_sheet(one, share):
    found = share_of(one, DEVICES["H200"], 8)
    assert found == (share if share is None else pytest.approx(share))


@pytest.mark.parametrize(
    ("device", "resource_type", "name"),
    [("NVIDIA H200", None, "V100-16GB"), ("NVIDIA A100", "rt_AF", "A100-40GB"), ("CPU", None, None)],
)
def test_the_sheet_is_that_of_the_kind_of_node(home, device, resource_type, name):  # noqa: ARG001 - of this user
    profile = load_profile(UserFolders.from_environment(os.environ), "abci", "--cluster")
    found = data_sheet(document(device=device), profile, resource_type)
    assert (found.name if found is not None else None) == name


@pytest.mark.parametrize(
    ("device", "memory", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79 << 30, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39 << 30, "A100-40GB"),
        ("NVIDIA H200", None, "H200"),
        ("NVIDIA L4", 22 << 30, None),
    ],
)
def test_without_a_gpu_in_the_profile_the_sheet_is_that_of_the_measured_name(home, device, memory, name):  # noqa: ARG001
    profile = load_profile(UserFolders.from_environment(os.environ), "local", "--cluster")
    found = data_sheet(document(device=device, memory=memory), profile, None)
    assert (found.name if found is not None else None) == name


def test_the_table_has_units_and_names_a_slow_device():
    slow = measurement("copy", rate=2.4e12, bytes=1 << 30, slowest_seconds=2e-5, slowest_host="n2")
    message = measurement("send", rate=25e6, group="one per node", bytes=64 << 10, ranks=2, seconds=2.5e-3)
    lines = [*table_lines(document(measurement(rate=494.7e12, shape=[8, 4, 2]), slow, message), DEVICES["H200"])]
    assert lines[0] == "lab: 2 nodes x 8 NVIDIA H200, torch 2.13.0, CUDA 13.0, nccl"
    assert [line.split() for line in lines[3:6]] == [
        ["product", *["8", "x", "4", "x", "2"], "device", "10", "us", "495", "TFLOP/s", "50%"],
        ["copy", "1024", "MiB", "device", "10", "us", "2.4", "TB/s", "50%"],
        ["send", "64", "KiB", "one", "per", "node", "(2", "ranks)", "2.5", "ms", "25", "MB/s", "0%"],
    ]
    assert lines[-2:] == [
        "data sheet: H200, 989.4 TFLOP/s",
        "n2 takes 2.00 times as long as the median for copy",
    ]
    assert "OF DATA SHEET" not in "\n".join(table_lines(document(slow), None))
