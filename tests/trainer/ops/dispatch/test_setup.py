"""What a rank can offer: the library, and of the images for a GPU the first that all ranks can have."""

import os

import pytest
import torch

from trainer.ops.build.build_settings import BuildError, BuildSettings
from trainer.ops.build.device_image import DeviceImage
from trainer.ops.dispatch import setup
from trainer.ops.dispatch.library import Library
from trainer.ops.dispatch.setup import Preparation, serial_kernels
from trainer.planning.kernel_choice import Wanted

CUDA = torch.device("cuda", 0)


@pytest.fixture
def images(monkeypatch, tmp_path):
    """Makes those loaders of images fail that it is given; gives those that were asked."""
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


def offered(tmp_path, *wanted):
    choices = {f"operation {name}": Wanted(name, "training.kernel_backend", False) for name in wanted}
    return Preparation(BuildSettings(tmp_path), CUDA).offer(choices)


def test_the_image_of_nvcc_comes_first_and_is_the_only_one(images, tmp_path):
    asked = images()
    offer = offered(tmp_path, "auto", "eager")
    assert asked == ["own"]
    assert offer.described == {"own": "sm_90, own"}
    assert "that of own is in use" in offer.missing["nvrtc"] and "own" not in offer.missing


def test_nvrtc_takes_its_place(images, tmp_path):
    asked = images("own")
    offer = offered(tmp_path, "auto")
    assert asked == ["own", "nvrtc"]
    assert offer.described == {"nvrtc": "sm_90, nvrtc"}
    assert offer.missing == {"own": "no own here"}


def test_nvrtc_by_name_is_not_put_after_nvcc(images, tmp_path):
    asked = images()
    offer = offered(tmp_path, "auto", "nvrtc")
    assert asked == ["nvrtc"]
    assert "that of nvrtc is in use" in offer.missing["own"]


def test_neither(images, tmp_path):
    images("own", "nvrtc")
    offer = offered(tmp_path, "own")
    assert offer.missing == {"own": "no own here", "nvrtc": "no nvrtc here"}
    assert offer.described == {}


def test_no_image_without_the_library(images, monkeypatch, tmp_path):
    asked = images()

    def fail(*_):
        raise BuildError("no library")

    monkeypatch.setattr(setup, "load_built", fail)
    offer = offered(tmp_path, "auto")
    assert asked == []
    assert offer.missing == {"own": "no library", "nvrtc": "no library"}


def test_a_compiler_that_said_more_than_a_line_can_be_asked_again(images, monkeypatch, tmp_path):
    images()

    def fail(*_):
        raise BuildError("g++ failed (1): error: no", "error: no\nand why")

    monkeypatch.setattr(setup, "load_built", fail)
    assert (
        offered(tmp_path, "auto")
        .missing["own"]
        .endswith("error: no; python -m trainer kernels build shows all that was said")
    )


def test_what_no_error_of_a_build_is_is_told_too(images, monkeypatch, tmp_path):
    images()

    def fail(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(setup, "load_built", fail)
    assert offered(tmp_path, "auto").missing["own"].startswith("OSError: [Errno 116] Stale file handle; ")


def test_nothing_is_looked_for_where_nothing_is_wanted(images, tmp_path):
    asked = images()
    offer = offered(tmp_path, "torch", "eager", "compile")
    assert asked == [] and offer.described == {} and offer.missing == {}


@pytest.mark.gpu
def test_a_gpu_gets_its_image(kernel_library):
    from tests.trainer.ops.dispatch.test_selection import configured

    settings = BuildSettings.from_variables(os.environ)
    described = setup.load_device_image(kernel_library.path, settings, CUDA, "own", setup.LineReport())
    choice = serial_kernels(configured(device="cuda"), settings, CUDA, torch.bfloat16)
    assert choice.backends["rms_norm"] == "own"
    assert choice.described["own"] == str(described) and str(described).startswith("sm_")
