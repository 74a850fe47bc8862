"""``python -m trainer kernels bench``: how fast every operation is, beside plain torch and the memory's own speed.

Torch-free until it measures: it starts itself once more in a process with the allocator settings that training on CPUs
has, which act at a process's start alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.ops.build.build_settings import BuildError

if TYPE_CHECKING:
    from trainer.ops.build.build_settings import BuildSettings
    from trainer.ops.tools.bench import Measurement, Plan

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "536870912",
}
"""glibc keeps what is freed: else large tensors are faulted in anew at every call, and that is what one measures."""

COLUMNS = ("operation", "size", "dtype", "backend", "ms", "GB/s", "of copy", "x reference", "x plain")
_WORDS = 4
"""Columns before those of figures, which are set to the right."""
_DTYPES = ("float32", "bfloat16", "float16")
_MOST = 1_000_000
"""Of threads, samples or MiB."""
_DRIVER = Path("/proc/driver/nvidia/version")


def main(arguments: Sequence[str], settings: BuildSettings, environment: Mapping[str, str]) -> int:
    """Measure, and print a table or a document.

    Args:
        arguments: the flags.
        settings: where built kernels are.
        environment: of this process.
    """
    options = _parser().parse_args(arguments)
    if not options.as_is:
        command = [sys.executable, "-m", "trainer", "kernels", "bench", *arguments, "--as-is"]
        code = subprocess.call(command, env={**environment, **ALLOCATOR})
        return code if code >= 0 else 128 - code
    requested = _requested(options.operation)
    if isinstance(requested, str):
        print(f"trainer kernels bench: {requested}", file=sys.stderr)
        return 2
    if options.device == "cuda" and not _has_gpu():
        print("trainer kernels bench: torch sees no GPU here; leave --device out", file=sys.stderr)
        return 3
    document = _measured(options, requested, settings)
    if isinstance(document, str):
        print(f"trainer kernels bench: {document}", file=sys.stderr)
        return 3
    document["allocator"] = {name: value for name, value in environment.items() if name.startswith("MALLOC_")}
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        _print_tables(document)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer kernels bench",
        description="Time every operation, forward and backward, on every backend that is there, beside plain torch.",
    )
    parser.add_argument(
        "operation", nargs="*", metavar="NAME[=SIZE,...]", help="such as rms_norm=4096x4096; unset: all"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=_DTYPES,
        help="of activations; may be repeated; unset: float32 and bfloat16",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="unset: the CPU, and a GPU if there is one")
    parser.add_argument("--threads", type=_count, default=1, metavar="N", help="of the CPU (1)")
    parser.add_argument(
        "--repeats", type=_count, default=7, metavar="N", help="samples, of which the median counts (7)"
    )
    parser.add_argument("--copy-mib", type=_count, default=256, metavar="N", help="size of what is copied (256)")
    parser.add_argument("--forward", action="store_true", help="without backward")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="the backend compile, too, which takes seconds for each size; unset: on GPUs",
    )
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time: of one thread, on a busy machine")
    parser.add_argument("--as-is", action="store_true", help="with the MALLOC_* settings of this environment")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {_MOST:,}")
    return int(text)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _requested(words: Sequence[str]) -> dict[str, list[tuple[int, ...]]] | str:
    """Operation -> sizes, none for the usual ones; or what is wrong with the words."""
    from trainer.ops.tools.bench import BENCHES

    requested: dict[str, list[tuple[int, ...]]] = {name: [] for name in BENCHES} if not words else {}
    for word in words:
        name, named, text = word.partition("=")
        if name not in BENCHES:
            return f"{name!r} is no operation; there are {', '.join(BENCHES)}"
        bench = BENCHES[name]
        sizes = text.split(",") if named else []
        requested[name] = [tuple(int(part) if part.isdecimal() else 0 for part in size.split("x")) for size in sizes]
        if any(len(size) != len(bench.sizes[0]) or 0 in size for size in requested[name]):
            example = "x".join(map(str, bench.sizes[0]))
            return f"{word!r}: a size of {name} is {bench.dims}, such as {example}"
    return requested


def _measured(
    options: argparse.Namespace, requested: Mapping[str, Sequence[tuple[int, ...]]], settings: BuildSettings
) -> dict[str, Any] | str:
    """The document; or why there is none."""
    import torch

    from trainer.ops.tools.bench import Plan, copy_speed, measure

    torch.set_num_threads(options.threads)
    usual = Plan(options.repeats, options.copy_mib, options.cpu_time, options.forward, bool(options.compile))
    # On a GPU it is what our own code is held against; on a CPU it takes longer than all the rest.
    on_gpu = replace(usual, compiles=options.compile is not False)
    dtypes = [getattr(torch, name) for name in options.dtype or _DTYPES[:2]]
    names = [options.device] if options.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    copies, rows = {}, []
    for name in names:
        device = torch.device(name, 0) if name == "cuda" else torch.device(name)
        plan = on_gpu if name == "cuda" else usual
        try:
            copies[name] = copy_speed(device, plan)
        except RuntimeError as error:  # such as memory that is too small
            return f"--copy-mib {plan.copy_mib} is too much: {str(error).splitlines()[0]}"
        for row in measure(requested, device, dtypes, plan, settings, copies[name]):
            rows.append(asdict(row))
            print(_progress(row), file=sys.stderr, flush=True)
    if "cuda" in names and not options.forward:
        _keep([row for row in rows if row["device"] == "cuda"], on_gpu, settings)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver() if "cuda" in names else None,
        "devices": {name: torch.cuda.get_device_name(0) if name == "cuda" else _processor() for name in names},
        "system": platform.platform(),
        "compiler": _compiler(settings),
        "threads": options.threads,
        "repeats": options.repeats,
        "passes": "forward" if options.forward else "forward and backward",
        "clock": "thread CPU time" if options.cpu_time else "wall time",
        "copy_gb_per_s": {name: speed / 1e9 for name, speed in copies.items()},
        "measurements": rows,
    }


def _keep(rows: Sequence[Mapping[str, Any]], plan: Plan, settings: BuildSettings) -> None:
    """Have ``auto`` go by measurements of the first GPU from now on."""
    import torch

    from trainer.ops.dispatch.setup import tuning_here

    measured = tuning_here(settings, torch.device("cuda", 0))
    usual = type(plan)()
    try:
        if plan.repeats < usual.repeats or plan.copy_mib < usual.copy_mib:
            # A small copy stays in the caches, and no kernel comes near its speed.
            said = f"auto goes by {usual.repeats} repeats and {usual.copy_mib} MiB copied or more; this is not kept"
        elif not plan.compiles:
            said = "auto goes by the backend compile, too; this is not kept"
        elif measured.keep(rows):
            said = f"kept in {measured.path}, which auto goes by on this kind of GPU"
        else:
            said = "too little was measured for auto to go by; nothing is kept"
    except OSError as error:
        said = f"the measurements cannot be kept, and auto does not go by them: {measured.path}: {error.strerror}"
    print(f"trainer kernels bench: {said}", file=sys.stderr)


def _driver() -> str | None:
    """The version of NVIDIA's driver: the first number with dots in what it says about itself."""
    with suppress(OSError):
        found = re.search(r"\d+(\.\d+)+", _DRIVER.read_text(errors="replace"))
        return found[0] if found is not None else None
    return None


def _progress(row: Measurement) -> str:
    told = row.problem or f"{row.seconds * 1e3:.3f} ms"
    return f"{row.device} {row.dtype} {row.operation} {row.size} {row.backend}: {told}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _compiler(settings: BuildSettings) -> str:
    from trainer.ops.build.build import find_compiler

    try:
        return find_compiler(settings.compilers).version
    except BuildError as error:
        return error.reason


def _print_tables(document: Mapping[str, Any]) -> None:
    allocator = " ".join(f"{name}={value}" for name, value in document["allocator"].items())
    print(
        f"torch {document['torch']}, {document['compiler']}, threads: {document['threads']}, {document['passes']}, "
        f"median of {document['repeats']} by {document['clock']}; {allocator or 'glibc as it comes, no MALLOC_* set'}"
    )
    for device, name in document["devices"].items():
        rows = [row for row in document["measurements"] if row["device"] == device]
        print(f"\n{name}: a copy moves {document['copy_gb_per_s'][device]:.1f} GB/s; * is what auto takes\n")
        print("\n".join(_aligned([COLUMNS, *(cells(row) for row in rows if not row["problem"])])))
        for line in problems(rows):
            print(line)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which columns stand below each other, figures by their ends."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            f"{text:<{width}}" if number < _WORDS else f"{text:>{width}}"
            for number, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What a table says of one measurement, by COLUMNS."""
    backend = f"{row['backend']} *" if row["is_chosen"] else row["backend"]
    figures = (f"{row['seconds'] * 1e3:.3f}", f"{row['gb_per_s']:.1f}", f"{row['of_copy']:.0%}")
    ratios = (f"{row[name]:.2f}" for name in ("of_reference", "of_plain"))
    return (row["operation"], row["size"], row["dtype"], backend, *figures, *ratios)


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What could not be measured: a line for each backend and reason."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row["problem"]:
            names.setdefault((row["backend"], row["problem"]), {})[row["operation"]] = None
    return [f"{backend} not measured for {', '.join(found)}: {why}" for (backend, why), found in names.items()]
