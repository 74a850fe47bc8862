"""GPU images: compilation by nvcc or NVRTC, cache, use without a compiler, errors."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from trainer.ops.build import device_image, nvrtc
from trainer.ops.build import sources as build_sources
from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_cache import BuildCache, read_sealed
from trainer.ops.build.build_settings import BuildError, BuildSettings, LineReport
from trainer.ops.build.device_image import (
    ImageCompiler,
    compiled_name,
    device_source,
    load_device_image,
    obtain_image,
)
from trainer.ops.build.nvcc import Nvcc, find_nvcc
from trainer.ops.build.nvrtc import Nvrtc, find_nvrtc

KERNEL = '#include "../common/twice.h"\nextern "C" __global__ void twice_float32(float *x) { *x = twice(*x); }\n'


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSettings:
    """Settings with a tiny csrc/ and an empty cache."""
    sources = tmp_path / "csrc"
    (sources / "twice").mkdir(parents=True)
    (sources / "common").mkdir()
    (sources / "twice" / "cuda.cu").write_text(KERNEL)
    (sources / "common" / "twice.h").write_text("__device__ inline float twice(float x) { return x + x; }\n")
    for module in (device_image, build_sources):
        monkeypatch.setattr(module, "source_folder", lambda: sources)
    return BuildSettings(tmp_path / "cache")


class Said(LineReport):
    """A report that records its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_nvcc(*_: object) -> Nvcc:
        raise BuildError("no nvcc was found")

    monkeypatch.setattr(device_image, "find_nvcc", no_nvcc)
    monkeypatch.setattr(device_image, "find_nvrtc", lambda *_: [])


def compiled(settings: BuildSettings, by: ImageCompiler, report: LineReport, **more: tuple[int, int]) -> Path:
    try:
        return obtain_image(settings, by, 90, report, **more)
    except BuildError as error:
        if "was found" in error.reason:
            pytest.skip(error.reason)
        raise


@pytest.mark.parametrize("by", ["nvcc", "NVRTC"])
def test_an_image_is_compiled_once_and_found_without_a_compiler(
    settings: BuildSettings, by: ImageCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Said()
    first = compiled(settings, by, report)
    image = read_sealed(first)
    assert image is not None
    assert image.startswith(b"\x7fELF")
    assert b"twice_float32" in image
    assert by in report.lines[0]
    before = len(report.lines)
    assert compiled(settings, by, report) == first
    without_compilers(monkeypatch)
    assert obtain_image(settings, by, 90, report, newest=(99, 0)) == first
    assert len(report.lines) == before, "it was compiled again"
    with pytest.raises(BuildError, match="was found"):
        obtain_image(settings, by, 80, report)
    with pytest.raises(BuildError, match="was found"):
        # The driver is older than the compiler of the image.
        obtain_image(settings, by, 90, report, newest=(5, 0))


def test_another_source_is_another_image(settings: BuildSettings) -> None:
    first = compiled(settings, "NVRTC", Said())
    header = device_image.source_folder() / "common" / "twice.h"
    header.write_text(header.read_text().replace("x + x", "2.0f * x"))
    assert compiled(settings, "NVRTC", Said()) != first


class FakeNvcc(Nvcc):
    """An nvcc that writes fixed bytes, or fails."""

    content: bytes | None = None

    def architectures(self) -> tuple[int, ...]:
        return (80, 90)

    def compile(self, source: Path, target: Path, *_: object) -> str:
        del source
        if self.content is None:
            raise BuildError("nvcc failed (1): error: no", "error: no")
        target.write_bytes(self.content)
        return ""


def use_nvcc(monkeypatch: pytest.MonkeyPatch, minor: int, made: bytes | None) -> None:
    class Made(FakeNvcc):
        content = made

    monkeypatch.setattr(device_image, "find_nvcc", lambda *_: Made("/nvcc", (12, minor)))


@pytest.mark.parametrize("flags", ["NVCC_FLAGS", "NVRTC_FLAGS"])
def test_other_flags_make_another_image(settings: BuildSettings, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.cache.name == "cache"
    before = device_image._folder()
    monkeypatch.setattr(device_image, flags, ("-O1",))
    assert device_image._folder() != before


def test_a_failed_compilation_uses_the_image_of_another_compiler(
    settings: BuildSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_nvcc(monkeypatch, 4, b"image")
    first = obtain_image(settings, "nvcc", 90, Said())
    use_nvcc(monkeypatch, 8, None)
    report = Said()
    assert obtain_image(settings, "nvcc", 90, report) == first
    assert report.lines[-1] == f"kernels: nvcc failed (1): error: no; using {first}, compiled earlier"
    with pytest.raises(BuildError, match=r"error: no"):
        obtain_image(settings, "nvcc", 80, Said())


def test_ranks_take_the_image_of_the_first_rank_and_not_the_newest(
    settings: BuildSettings, emulated_cuda: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_image, "_architecture_of", lambda _: 90)
    device = torch.device("cuda", 0)
    for minor in (4, 8):
        use_nvcc(monkeypatch, minor, emulated_cuda.library.emulation_image())
        here = emulated_cuda.path, settings, device, "nvcc", Said()
        assert str(load_device_image(*here)) == f"sm_90, nvcc 12.{minor}"
        name = compiled_name(emulated_cuda.path, settings, device, "nvcc")
        assert name.endswith(f"/nvcc 12.{minor}") and load_device_image(*here).name == name
    # A rank that builds nothing, on this node or another node.
    first = name.replace("12.8", "12.4")
    found = load_device_image(*here, may_build=False, name=first)
    assert (found.name, str(found)) == (first, "sm_90, nvcc 12.4")
    with pytest.raises(BuildError, match=r"the kernels of rank 0 are not available here: .* has no images-"):
        load_device_image(*here, may_build=False, name=name.replace("12.8", "12.9"))


def test_old_images_are_removed_by_architecture(settings: BuildSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    then = time.time() - 40 * 24 * 3600
    images = []
    for minor in range(5):
        use_nvcc(monkeypatch, minor, b"image")
        images.append(obtain_image(settings, "nvcc", 90, Said()))
    for minor, image in enumerate(images):
        os.utime(image, (then + minor, then + minor))
    use_nvcc(monkeypatch, 9, b"image")
    obtain_image(settings, "nvcc", 80, Said())
    assert all(image.exists() for image in images)
    obtain_image(settings, "nvcc", 90, Said())
    assert [image.exists() for image in images] == [False, False, True, True, True]
    assert BuildCache.below(settings.cache).find_any("images-*/sm_80-*.cubin") is not None


@pytest.mark.parametrize("before", [("env",), ()])
def test_nvcc_gets_a_host_compiler_of_several_words_as_one_program(before: tuple[str, ...], tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc of a test"
    # The fake nvcc calls its host compiler with an option that env does not know.
    nvcc.write_text(
        "#!/bin/bash\nwhile (($#)); do case $1 in -o) shift; target=$1;; -ccbin) shift; host=$1;; esac; shift; done\n"
        '"$host" -dumpversion >"$target"\n'
    )
    nvcc.chmod(0o755)
    here = find_compiler(BuildSettings.from_variables(os.environ).compilers).command
    host = find_compiler([(*before, *here)]).command
    target = tmp_path / "image of a test"
    Nvcc(str(nvcc), (13, 0)).compile(tmp_path / "a.cu", target, 90, host, time.monotonic() + 60.0)
    assert target.read_text().split(".")[0].strip().isdigit()


def test_includes_become_one_text_with_line_numbers(settings: BuildSettings) -> None:
    assert settings.cache.name == "cache"
    text = device_source()
    assert "#include" not in text
    assert text.index("return x + x") < text.index("twice_float32")
    kernels = device_image.source_folder() / "twice" / "cuda.cu"
    kernels.write_text(f"{KERNEL}\n__device__ int x = nothing;\n")
    with pytest.raises(BuildError, match=r"twice/cuda\.cu\(4\): error: identifier \"nothing\"") as raised:
        compiled(settings, "NVRTC", Said())
    assert raised.value.log


def test_reasons_are_reported(settings: BuildSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(Nvcc):
        def architectures(self) -> tuple[int, ...]:
            return (75, 80, 90)

    monkeypatch.setattr(device_image, "find_nvcc", lambda *_: Old("/nvcc", (13, 0)))
    with pytest.raises(BuildError, match=r"^nvcc 13\.0 does not compile for sm_70, only for sm_75 to sm_90$"):
        obtain_image(settings, "nvcc", 70, Said())
    with pytest.raises(
        BuildError, match=r"^nvcc 13\.0 is newer than the driver, which supports CUDA 12\.4; use a CUDA 12"
    ):
        obtain_image(settings, "nvcc", 80, Said(), newest=(12, 4))
    with pytest.raises(BuildError, match=r"^the kernels are not compiled; run llmctl env kernels build$"):
        obtain_image(settings, "nvcc", 80, Said(), newest=(13, 0), may_build=False)


def test_files_that_are_no_nvrtc_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia" / "cuda_nvrtc" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnvrtc.so.12").write_bytes(b"no library")
    assert all(not nvrtc.path.startswith(str(tmp_path)) for nvrtc in find_nvrtc([tmp_path], ()))
    with pytest.raises(OSError, match=r"libnvrtc\.so\.12"):
        Nvrtc(str(folder / "libnvrtc.so.12"))


def test_compilers_of_conda_are_found_beside_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lib/libnvrtc.so.12", "bin/nvcc"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("#!/bin/sh\necho release 12.6\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr(nvrtc, "Nvrtc", str)
    assert str(tmp_path / "lib/libnvrtc.so.12") in map(str, find_nvrtc([], []))
    # Python calls a linker to find installed libraries, which needs a temporary folder.
    monkeypatch.setattr("ctypes.util.find_library", lambda _: (tmp_path / "missing").read_text())
    assert str(tmp_path / "lib/libnvrtc.so.12") in map(str, find_nvrtc([], []))
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_nvcc([], []) == Nvcc(str(tmp_path / "bin/nvcc"), (12, 6))


HALF = 'extern "C" int half(void) { return 13; }'
NVRTC = """#include <dlfcn.h>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
extern "C" int nvrtcGetCUBIN(void) { return 0; }
extern "C" int nvrtcCreateProgram(void **program, const char *source, ...) { return *program = strdup(source), 0; }
extern "C" int nvrtcDestroyProgram(void **) { return 0; }
extern "C" int nvrtcCompileProgram(void *program, ...) {
  while (strcmp(static_cast<char *>(program), "hang") == 0) pause();
  abort();
}
extern "C" int nvrtcGetSupportedArchs(void) { return 0; }
extern "C" const char *nvrtcGetErrorString(int) { return "no builtins"; }
extern "C" int nvrtcVersion(int *major, int *minor) {
  void *builtins = dlopen("libnvrtc-builtins.so.13.0", RTLD_NOW);
  if (builtins == nullptr) return 1;
  *major = reinterpret_cast<int (*)()>(dlsym(builtins, "half"))();
  *minor = 0;
  return 0;
}"""


@pytest.fixture(scope="module")
def fake_nvrtc(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a fake NVRTC 13 that hangs or crashes in a compilation."""
    root = tmp_path_factory.mktemp("nvrtc")
    folder = root / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    compiler = find_compiler(BuildSettings.from_variables(os.environ).compilers)
    for name, text in (("libnvrtc-builtins.so.13.0", HALF), ("libnvrtc.so.13", NVRTC)):
        (root / "half.cpp").write_text(text)
        soname, source = f"-Wl,-soname,{name}", str(root / "half.cpp")
        command = [*compiler.command, "-shared", "-fPIC", soname, "-o", str(folder / name), source, "-ldl"]
        subprocess.run(command, check=True)
    return str(folder / "libnvrtc.so.13")


def test_nvrtc_finds_its_builtins_beside_it(fake_nvrtc: str) -> None:
    """The packages of CUDA 13 set no search path to the builtins library."""
    assert Nvrtc(fake_nvrtc).version == (13, 0)


@pytest.mark.parametrize(
    ("source", "limit_s", "problem"),
    [
        ("hang", 0.5, r"^NVRTC 13\.0: the compiler did not finish in time"),
        ("crash", 60.0, r"^NVRTC 13\.0: .* was killed by signal 6"),
    ],
)
def test_nvrtc_that_hangs_or_crashes_ends_no_other_process(
    fake_nvrtc: str, source: str, limit_s: float, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "kernels.cu").write_text(source)
    with pytest.raises(BuildError, match=problem):
        Nvrtc(fake_nvrtc).compile(
            tmp_path / "kernels.cu", tmp_path / "a.cubin", 90, deadline=time.monotonic() + limit_s
        )
    assert not (tmp_path / "a.cubin").exists()
