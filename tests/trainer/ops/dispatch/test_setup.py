"""Availability on a rank: the library, and the first common GPU image."""

import os

import pytest
import torch

from trainer.ops.build.build_settings import BuildError, BuildSettings
from trainer.ops.build.device_image import DeviceImage
from trainer.ops.dispatch import setup
from trainer.ops.dispatch.library import Library
from trainer.ops.dispatch.setup import KernelSetup, serial_kernels
from trainer.planning.kernel_choice import RequestedBackend

CUDA = torch.device("cuda", 0)


@pytest.fixture
def images(monkeypatch, tmp_path):
    """Make the loaders of the given images fail. Returns the requested images."""
    asked = []

    def make(*failing):
        def load(_library, _settings, _device, backend, *_, may_build, name):
            assert not may_build and name is None
            asked.append(backend)
            if backend in failing:
                raise BuildError(f"no {backend} here")
            return DeviceImage(tmp_path / f"images/sm_90-{backend}.cubin")

        monkeypatch.setattr(setup, "load_device_image", load)
        monkeypatch.setattr(setup, "load_built", lambda *_: Library(tmp_path / "library.so", "portable"))
        return asked

    return make


def offered(tmp_path, *requested):
    selections = {f"operation {name}": RequestedBackend(name, "training.kernel_backend", False) for name in requested}
    return KernelSetup(BuildSettings(tmp_path), CUDA).availability(selections)


def test_the_image_of_nvcc_comes_first_and_is_the_only_one(images, tmp_path):
    asked = images()
    availability = offered(tmp_path, "auto", "reference")
    assert asked == ["native"]
    assert availability.described == {"native": "sm_90, native"}
    assert "the native image is in use" in availability.missing["nvrtc"] and "native" not in availability.missing


def test_nvrtc_replaces_nvcc(images, tmp_path):
    asked = images("native")
    availability = offered(tmp_path, "auto")
    assert asked == ["native", "nvrtc"]
    assert availability.described == {"nvrtc": "sm_90, nvrtc"}
    assert availability.missing == {"native": "no native here"}


def test_nvrtc_by_name_comes_before_nvcc(images, tmp_path):
    asked = images()
    availability = offered(tmp_path, "auto", "nvrtc")
    assert asked == ["nvrtc"]
    assert "the nvrtc image is in use" in availability.missing["native"]


def test_without_any_image(images, tmp_path):
    images("native", "nvrtc")
    availability = offered(tmp_path, "native")
    assert availability.missing == {"native": "no native here", "nvrtc": "no nvrtc here"}
    assert availability.described == {}


def test_no_image_without_the_library(images, monkeypatch, tmp_path):
    asked = images()

    def fail(*_):
        raise BuildError("no library")

    monkeypatch.setattr(setup, "load_built", fail)
    availability = offered(tmp_path, "auto")
    assert asked == []
    assert availability.missing == {"native": "no library", "nvrtc": "no library"}


def test_a_long_compiler_error_names_the_command_that_prints_it(images, monkeypatch, tmp_path):
    images()

    def fail(*_):
        raise BuildError("g++ failed (1): error: no", "error: no\nand why")

    monkeypatch.setattr(setup, "load_built", fail)
    assert (
        offered(tmp_path, "auto")
        .missing["native"]
        .endswith("error: no; python -m trainer kernels build prints the full log")
    )


def test_unexpected_errors_are_reported_too(images, monkeypatch, tmp_path):
    images()

    def fail(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(setup, "load_built", fail)
    assert offered(tmp_path, "auto").missing["native"].startswith("OSError: [Errno 116] Stale file handle; ")


def test_nothing_is_searched_without_a_request(images, tmp_path):
    asked = images()
    availability = offered(tmp_path, "torch", "reference")
    assert asked == [] and availability.described == {} and availability.missing == {}


@pytest.mark.gpu
def test_a_gpu_gets_its_image(kernel_library):
    from tests.trainer.ops.dispatch.test_selection import configured

    settings = BuildSettings.from_variables(os.environ)
    described = setup.load_device_image(kernel_library.path, settings, CUDA, "native", setup.LineReport())
    selection = serial_kernels(configured(device="cuda"), settings, CUDA, torch.bfloat16)
    assert selection.backends["rms_norm"] == "native"
    assert selection.described["native"] == str(described) and str(described).startswith("sm_")
