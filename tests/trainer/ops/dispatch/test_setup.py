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
    """Make the images of the given compilers fail. Returns the requested compilers."""
    asked = []

    def make(*failing):
        def load(_library, _settings, _device, by, *_, may_build, name):
            assert not may_build and name is None
            asked.append(by)
            if by in failing:
                raise BuildError(f"no {by} here")
            return DeviceImage(tmp_path / f"images/sm_90-{by}.cubin")

        monkeypatch.setattr(setup, "load_device_image", load)
        monkeypatch.setattr(setup, "load_built", lambda *_: Library(tmp_path / "library.so", "portable"))
        return asked

    return make


def offered(tmp_path, *requested):
    selections = {f"operation {name}": RequestedBackend(name, "training.kernel_backend", False) for name in requested}
    return KernelSetup(BuildSettings(tmp_path), CUDA).availability(selections)


@pytest.mark.parametrize(
    ("failing", "asked", "described", "missing"),
    [
        ((), ["nvcc"], {"native": "sm_90, nvcc"}, {}),
        (("nvcc",), ["nvcc", "NVRTC"], {"native": "sm_90, NVRTC"}, {}),
        (("nvcc", "NVRTC"), ["nvcc", "NVRTC"], {}, {"native": "no nvcc here; no NVRTC here"}),
    ],
)
def test_nvrtc_builds_the_image_where_nvcc_cannot(images, tmp_path, failing, asked, described, missing):
    found = images(*failing)
    availability = offered(tmp_path, "auto", "reference")
    assert (found, availability.described, availability.missing) == (asked, described, missing)


def test_no_image_without_the_library(images, monkeypatch, tmp_path):
    asked = images()

    def fail(*_):
        raise BuildError("no library")

    monkeypatch.setattr(setup, "load_built", fail)
    availability = offered(tmp_path, "auto")
    assert asked == []
    assert availability.missing == {"native": "no library"}


def test_a_long_compiler_error_names_the_command_that_prints_it(images, monkeypatch, tmp_path):
    images()

    def fail(*_):
        raise BuildError("g++ failed (1): error: no", "error: no\nand why")

    monkeypatch.setattr(setup, "load_built", fail)
    assert (
        offered(tmp_path, "auto").missing["native"].endswith("error: no; llmctl env kernels build prints the full log")
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
    described = setup.load_device_image(kernel_library.path, settings, CUDA, "nvcc", setup.LineReport())
    selection = serial_kernels(configured(device="cuda"), settings, CUDA, torch.bfloat16)
    assert selection.backends["rms_norm"] == "native"
    assert selection.described["native"] == str(described) and str(described).startswith("sm_")
