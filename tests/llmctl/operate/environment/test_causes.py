"""The cause of a failed step, from lines of real programs; and torch's index by GPU and driver."""

import pytest

from llmctl.doctor.torch_wheels import choose_index
from llmctl.operate.environment.causes import cause_of


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk or your quota is full"),
        ("ERROR: Could not install packages due to an OSError: [Errno 122] Disk quota exceeded", "your quota is full"),
        ("bash: line 3: module: command not found", "set environment.modules and environment.module_init"),
        ("llmctl: module load cuda/12.6 failed", "`module avail` on the cluster shows their names"),
        ("The virtual environment was not created successfully because ensurepip is not available.", "python3-venv"),
        ("fatal: unable to access 'https://github.com/x/': Could not resolve host: github.com", "--find-links FOLDER"),
        (
            "Retrying: Failed to establish a new connection: [Errno 101] Network is unreachable\n"
            "ERROR: No matching distribution found for torch>=2.10",
            "no network from there",
        ),
        ("ERROR: No matching distribution found for torch>=2.10", "no wheel of torch>=2.10"),
        ("OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.", "has nvcc"),
        ("/bin/sh: 1: nvcc: not found", "no CUDA compiler"),
        ("error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory", "no C++ compiler"),
        ("one.c:1:10: fatal error: Python.h: No such file or directory", "no header files of Python"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "the memory ran out"),
        ("ERROR: x-1-cp39-cp39-linux_x86_64.whl is not a supported wheel on this platform.", "another Python"),
        ("all is well", ""),
    ],
)
def test_the_cause_is_told(line, remedy):
    assert remedy in cause_of(line) and bool(remedy) == bool(cause_of(line))


@pytest.mark.parametrize(
    ("gpus", "driver", "index"),
    [
        ({}, None, "cpu"),
        ({"V100": "7.0"}, None, "cu126"),
        ({"V100": "7.0", "A100": "8.0"}, "580.65.06", "cu126"),
        ({"H100": "9.0"}, None, "cu128"),
        ({"H100": "9.0"}, "570.86.15", "cu128"),
        ({"H100": "9.0"}, "580.65.06", "cu130"),
        ({"B200": "10.0"}, None, "cu128"),
        ({"unheard of": None}, None, "cu128"),
        ({"MI300X": "gfx942"}, None, "rocm7.1"),
    ],
)
def test_torch_fits_gpu_and_driver(gpus, driver, index):
    found = choose_index(gpus, driver)
    assert found is not None and found.url.rpartition("/")[2] == index


@pytest.mark.parametrize(("gpus", "driver"), [({"V100": "7.0", "B200": "10.0"}, None), ({"A100": "8.0"}, "470.57.02")])
def test_no_torch_fits(gpus, driver):
    assert choose_index(gpus, driver) is None
