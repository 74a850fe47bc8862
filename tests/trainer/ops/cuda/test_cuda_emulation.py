"""The emulated GPU detects faulty kernels."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import ORDERS, EmulatedCuda, build_emulation, contraction
from tests.trainer.ops.cuda.cuda_emulation.guarded_memory import guarded
from trainer.ops.build.build import find_compiler
from trainer.ops.build.build_settings import BuildSettings

_KERNELS = Path(__file__).parent / "cuda_emulation" / "faulty_kernels.cu"


class Faulty(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("in_", ctypes.c_void_p), ("size", ctypes.c_longlong)]


@pytest.fixture(scope="module")
def faulty_cuda() -> EmulatedCuda:
    return EmulatedCuda(build_emulation(BuildSettings.from_variables(os.environ), "faulty_kernels", [_KERNELS]))


def launch(cuda: EmulatedCuda, name: str, threads: int, out: torch.Tensor, values: torch.Tensor, size: int) -> None:
    cuda.launch(name, threads, Faulty(out.data_ptr(), values.data_ptr(), size))


@pytest.mark.parametrize("threads", [32, 64, 1024])
@pytest.mark.parametrize("order", ORDERS)
def test_a_sound_kernel_passes_in_every_order(faulty_cuda: EmulatedCuda, threads: int, order: int) -> None:
    values, out = torch.arange(1000.0), torch.full((1,), torch.nan)
    with faulty_cuda.order(order):
        launch(faulty_cuda, "sums_a_row", threads, out, values, min(threads, 1000))
    assert out.item() == sum(range(min(threads, 1000)))


@pytest.mark.parametrize(
    ("name", "threads", "problem"),
    [
        (
            "skips_a_barrier",
            64,
            r"CUDA_ERROR_LAUNCH_FAILED.*skips_a_barrier, block 0: thread 0 waits at the barrier of .* 32 of 64",
        ),
        ("meets_at_two_barriers", 64, "thread 32 is at the barrier of faulty_kernels.cu:.* while others"),
        ("leaves_lanes_out", 32, "thread 0 waits at the shuffle of .* 16 of 32"),
        ("sums_a_row", 48, "waits at the"),
        ("shuffles_half_a_warp", 32, "mask ffff, not all lanes"),
        ("writes_beyond", 32, "CUDA_ERROR_ILLEGAL_ADDRESS.*thread 0 touches .* not mapped"),
        ("reads_a_misaligned_pack", 32, r"thread 0 touches 0x[0-9a-f]+ in device.h:\d+, which is not a multiple of 16"),
        ("sums_a_row", 2048, r"CUDA_ERROR_INVALID_VALUE \(1\)"),
        ("writes_beyond", 512, r"CUDA_ERROR_INVALID_VALUE \(1\)"),
    ],
)
def test_mistakes_are_named(faulty_cuda: EmulatedCuda, name: str, threads: int, problem: str) -> None:
    out, values = guarded(torch.zeros(64)), torch.zeros(2048)
    with pytest.raises(RuntimeError, match=problem):
        launch(faulty_cuda, name, threads, out, values, 65 if name == "reads_a_misaligned_pack" else 64)
    # The next launch is not affected.
    sound = torch.full((1,), torch.nan)
    launch(faulty_cuda, "sums_a_row", 64, sound, torch.ones(64), 64)
    assert sound.item() == 64


@pytest.mark.parametrize("name", ["forgets_a_barrier", "writes_before_all_have_read"])
def test_a_race_shows_as_a_result_that_depends_on_the_order(faulty_cuda: EmulatedCuda, name: str) -> None:
    outcomes = []
    for order in ORDERS:
        out = torch.zeros(65)
        with faulty_cuda.order(order):
            launch(faulty_cuda, name, 64, out, out, 0)
        outcomes.append(out)
    assert not torch.equal(outcomes[0], outcomes[1])


def test_shared_memory_is_poisoned(faulty_cuda: EmulatedCuda) -> None:
    out = torch.zeros(64)
    launch(faulty_cuda, "reads_what_nobody_wrote", 64, out, out, 64)
    assert out[:32].eq(1).all()
    assert out[32:].isnan().all()


def test_products_are_not_rounded_before_they_are_added(faulty_cuda: EmulatedCuda) -> None:
    if not contraction():
        pytest.skip("this processor has no fused multiply-add")
    factor = 1.0 + 2.0**-12
    values, out = torch.tensor([factor, factor, 1.0 + 2.0**-11]), torch.zeros(1)
    assert values[0] * values[1] == values[2]
    launch(faulty_cuda, "takes_a_product_to_be_rounded", 1, out, values, 0)
    assert out.item() == 2.0**-24


def test_threads_without_a_device_are_reported(faulty_cuda: EmulatedCuda) -> None:
    problems = []

    def other_thread() -> None:
        out = torch.zeros(1)
        try:
            launch(faulty_cuda, "sums_a_row", 32, out, out, 1)
        except RuntimeError as error:
            problems.append(str(error))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert len(problems) == 1
    assert "CUDA_ERROR_INVALID_CONTEXT" in problems[0]


@pytest.mark.parametrize(("index", "is_inside"), [(31, True), (32, False)])
def test_the_address_sanitizer_detects_accesses_beyond_shared_memory(index: int, is_inside: bool) -> None:
    settings = BuildSettings.from_variables(os.environ)
    compiler = find_compiler(settings.compilers).command
    asked = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = Path(asked.stdout.strip())
    if not library.is_absolute():
        pytest.skip("this compiler has no address sanitizer")
    build_emulation(settings, "faulty_kernels", [_KERNELS], "-fsanitize=address")
    module = "tests.trainer.ops.cuda.cuda_emulation.sanitized_launch"
    done = subprocess.run(
        [sys.executable, "-m", module, "overflows_shared_memory", str(index)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LD_PRELOAD": str(library), "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert ("launched" in done.stdout) is is_inside, done.stderr
    assert ("global-buffer-overflow" in done.stderr) is not is_inside
