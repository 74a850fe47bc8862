"""Measurements of one rank alone: device, speed of a matrix product, memory, folders."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from trainer.preflight.facts import FolderFacts
from trainer.process.device import device_name

_TRIES_S = 0.4
"""Seconds of matrix products on a CPU, of which the fastest counts."""
_CPU_SIDE = 256
"""0.4 ms on a core of 90 GFLOP/s: shorter than the time slice after which another process gets the core."""
_GPU_SIDE = 8192
"""1.1 TFLOP, 1 to 10 ms in fp16 on GPUs from Volta to Hopper: long beside a launch."""
_GPU_TRIES = 20
_SMI_S = 5.0
_SMI_FIELDS = (
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.failure",
    "remapped_rows.pending",
    "retired_pages.pending",
)
_BYTES = b"preflight" * 455
"""About one page."""


def product_speed(device: torch.device, is_again: bool = False) -> float:
    """FLOP/s of the fastest of several short matrix products.

    On a CPU one thread multiplies, and its own CPU time counts: other work on the machine takes time slices, but does
    not slow the fastest try. On a GPU its own clock counts.

    Args:
        device: of this rank.
        is_again: take longer, as the first measurement was slow.
    """
    if device.type == "cuda":
        return _gpu_speed(device, _GPU_TRIES * (3 if is_again else 1))
    return _cpu_speed(_TRIES_S * (5 if is_again else 1))


def _cpu_speed(seconds: float) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.full((_CPU_SIDE, _CPU_SIDE), 0.5)
        best, end = float("inf"), time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.thread_time()
            torch.mm(a, a)
            best = min(best, time.thread_time() - begin)
    finally:
        torch.set_num_threads(threads)
    return 2 * _CPU_SIDE**3 / max(best, 1e-9)


def _gpu_speed(device: torch.device, tries: int) -> float:
    best = float("inf")
    # This thread may have another GPU as its current one.
    with torch.cuda.device(device):
        a = torch.full((_GPU_SIDE, _GPU_SIDE), 0.5, device=device, dtype=torch.float16)
        out = torch.empty_like(a)
        for _ in range(tries):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            torch.mm(a, a, out=out)
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
        del a, out
        torch.cuda.empty_cache()
    return float(2 * _GPU_SIDE**3 / max(best, 1e-9))


def device_memory(device: torch.device) -> tuple[float | None, float | None]:
    """Free and total bytes of a GPU; None on a CPU."""
    if device.type != "cuda":
        return None, None
    free, total = torch.cuda.mem_get_info(device)
    return float(free), float(total)


def host_memory_free() -> float | None:
    """Available bytes of the node (proc(5), MemAvailable)."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    return None


def kind_of_device(device: torch.device) -> str:
    """Name of the GPU or the CPU, by which ranks are compared."""
    if device.type == "cuda":
        return device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return device_name(device)


def device_count(device: torch.device, ranks_here: int) -> int:
    """Number of GPUs that this rank sees, or of ranks that share the CPUs.

    A launcher may make only its own GPU visible to each rank: then every rank has all that it can have.
    """
    if device.type != "cuda":
        return ranks_here
    visible = torch.cuda.device_count()
    return ranks_here if visible == 1 else visible


def reported_errors(device: torch.device) -> tuple[str, str]:
    """Words on errors of the GPU that need a repair, and on those that it has survived; both may be empty.

    By nvidia-smi, which reads ECC errors and remapped rows without root. Xid errors stand in the kernel's log, which
    only root reads. Without the program, or on a MIG slice, nothing is known.
    """
    program = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if program is None:
        return "", ""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    query = [program, f"--id=GPU-{uuid}", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    return read_reported(done.stdout)


def read_reported(line: str) -> tuple[str, str]:
    """Words on errors in a line of nvidia-smi, see ``reported_errors``."""
    values = [value.strip() for value in line.strip().split(",")]
    if len(values) != len(_SMI_FIELDS):
        return "", ""
    errors, failure, rows, pages = values
    broken = "a row of its memory could not be remapped" if failure.lower() in ("yes", "1") else ""
    worn = [f"{errors} uncorrected ECC errors since the last reset"] if errors.isdigit() and int(errors) else []
    if "yes" in (rows.lower(), pages.lower()):
        worn.append("memory that a reset of the GPU would replace")
    return broken, " and ".join(worn)


def write_folder(name: str, path: Path, rank: int) -> FolderFacts:
    """Write, read and remove a small file in a folder, or in the nearest folder above that exists.

    The program creates missing folders later; a folder above that cannot be written would refuse them.
    """
    try:
        folder = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        file = folder / f".preflight-{rank:05d}-{os.getpid()}"
        try:
            with file.open("wb") as written:
                written.write(_BYTES)
                written.flush()
                os.fsync(written.fileno())
            if file.read_bytes() != _BYTES:
                return FolderFacts(name, str(path), "a file that was written has another content")
        finally:
            with suppress(OSError):
                file.unlink(missing_ok=True)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return FolderFacts(name, str(path), f"[Errno {error.errno}] {os.strerror(error.errno or 0)}", is_full)
    free = None
    with suppress(OSError):
        free = float(shutil.disk_usage(folder).free)
    return FolderFacts(name, str(path), free=free)


def write_folders(folders: Sequence[tuple[str, Path]], rank: int) -> tuple[FolderFacts, ...]:
    """Facts on all folders, by name and path."""
    return tuple(write_folder(name, path, rank) for name, path in folders)
