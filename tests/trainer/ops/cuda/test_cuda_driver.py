"""Images, devices, contexts and errors of csrc/common/launch/driver.cpp, emulated and without a GPU."""

import ctypes
import os
import threading
from pathlib import Path

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import (
    EmulatedCuda,
    all_kernels,
    entry_points,
    registered_kernels,
)
from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_settings import BuildError, BuildSettings
from trainer.ops.build.device_image import DeviceInterface
from trainer.ops.dispatch.library import Library

NO_IMAGE, TOO_LARGE = -2, -3
INVALID_DEVICE, INVALID_IMAGE = 101, 200


def sum_columns(cuda: EmulatedCuda) -> int:
    """Error code of a launch that needs the current device and its image."""
    ones, weight = torch.ones(2, 4), torch.ones(4)
    normed, scale = torch.empty(2, 4), torch.empty(2)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (ones, weight, normed, scale)]
    hidden, weights, out, factors = pointers
    sizes = ctypes.c_int64(2), ctypes.c_int64(4), ctypes.c_double(1e-5), 0, None
    return int(cuda.library.llmctl_cuda_rms_norm(0, hidden, None, weights, None, out, factors, *sizes))


def test_a_device_without_an_image_is_reported(emulated_cuda: EmulatedCuda) -> None:
    library = emulated_cuda.library
    assert library.llmctl_cuda_use(1, None) == 0
    try:
        assert sum_columns(emulated_cuda) == NO_IMAGE
        assert emulated_cuda.error(NO_IMAGE) == "no kernels have been loaded on this device"
    finally:
        assert library.llmctl_cuda_use(0, None) == 0
    assert sum_columns(emulated_cuda) == 0


def test_bad_images_and_devices_are_reported(emulated_cuda: EmulatedCuda) -> None:
    library = emulated_cuda.library
    assert library.llmctl_cuda_load(0, b"no image") == INVALID_IMAGE
    assert emulated_cuda.error(INVALID_IMAGE) == "CUDA_ERROR_INVALID_IMAGE (200): device kernel image is invalid"
    assert emulated_cuda.load(7) == INVALID_DEVICE
    assert emulated_cuda.load(1000) == TOO_LARGE
    assert emulated_cuda.load(-1) == TOO_LARGE
    assert emulated_cuda.error(12345) == "unknown error of CUDA (12345): no description"
    assert sum_columns(emulated_cuda) == 0, "what was loaded before is gone"


def test_every_thread_uses_the_device_for_itself(emulated_cuda: EmulatedCuda) -> None:
    errors = []

    def other_thread() -> None:
        errors.append(sum_columns(emulated_cuda))
        errors.append(emulated_cuda.library.llmctl_cuda_use(0, None))
        errors.append(sum_columns(emulated_cuda))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert errors == [201, 0, 0]


def current_device(cuda: EmulatedCuda) -> int:
    """Device of this thread's current context."""
    device = ctypes.c_int(-1)
    assert cuda.library.cuCtxGetDevice(ctypes.byref(device)) == 0
    return device.value


def test_the_previous_context_is_restored(emulated_cuda: EmulatedCuda) -> None:
    library, before = emulated_cuda.library, ctypes.c_void_p()
    assert library.llmctl_cuda_use(1, ctypes.byref(before)) == 0
    assert current_device(emulated_cuda) == 1
    assert library.llmctl_cuda_restore(before) == 0
    assert current_device(emulated_cuda) == 0


def test_images_of_other_devices_leave_the_current_one(emulated_cuda: EmulatedCuda) -> None:
    assert emulated_cuda.library.llmctl_cuda_load(1, b"no image") == INVALID_IMAGE
    assert current_device(emulated_cuda) == 0
    assert emulated_cuda.load(0) == 0
    assert current_device(emulated_cuda) == 0


def test_a_launch_looks_up_no_function(emulated_cuda: EmulatedCuda) -> None:
    """All kernels are loaded with their image.

    None could be loaded in a stream that is captured into a graph.
    """
    suffixes = ["_float32", "_bfloat16", "_float16", "_float64"]
    of_types = {"kAll": suffixes, "kNoDouble": suffixes[:3], "kNoType": [""]}
    listed = {name + suffix for name, types in registered_kernels().items() for suffix in of_types[types]}
    compiler = find_compiler(BuildSettings.from_variables(os.environ).compilers)
    assert listed == {name for _, name, _ in entry_points(compiler, all_kernels())}
    assert emulated_cuda.load(0) == 0, "one of them is not in the image"


def test_many_threads_launch_at_once(emulated_cuda: EmulatedCuda) -> None:
    errors = []

    def launches() -> None:
        errors.append(emulated_cuda.library.llmctl_cuda_use(0, None))
        errors.extend(sum_columns(emulated_cuda) for _ in range(50))

    assert emulated_cuda.load(0) == 0
    threads = [threading.Thread(target=launches) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [0] * 204


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA's driver")
def test_a_missing_driver_is_reported(kernel_library: Library) -> None:
    with pytest.raises(BuildError, match=r"CUDA's driver \(libcuda.so.1\) cannot be loaded"):
        DeviceInterface(Path(kernel_library.path)).driver_version()


def test_interface_loads_and_names_the_driver(emulated_cuda: EmulatedCuda) -> None:
    interface = DeviceInterface(emulated_cuda.path)
    assert interface.driver_version() == (13, 0)
    interface.load(0, emulated_cuda.library.emulation_image())
    with pytest.raises(BuildError, match="CUDA_ERROR_INVALID_IMAGE"):
        interface.load(0, b"no image")
