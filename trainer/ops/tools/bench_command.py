"""``python -m trainer kernels bench``: speed of all operations, plain torch and a copy.

Torch-free until the measurement: the command restarts itself with the allocator settings of training on CPUs, which
take effect only at the start of a process.
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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.ops.build.build_settings import BuildError

if TYPE_CHECKING:
    from trainer.ops.build.build_settings import BuildSettings
    from trainer.ops.tools.bench import Measurement

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "536870912",
}
"""Keep freed memory in glibc: otherwise page faults of large tensors dominate the measurement."""

COLUMNS = ("operation", "size", "dtype", "backend", "ms", "GB/s", "of copy", "x reference", "x plain")
_WORDS = 4
"""Number of text columns before the figures, which are right-aligned."""
_DTYPES = ("float32", "bfloat16", "float16")
_MOST = 1_000_000
"""Maximum of threads, samples and MiB."""
_DRIVER = Path("/proc/driver/nvidia/version")


def main(arguments: Sequence[str], settings: BuildSettings, environment: Mapping[str, str]) -> int:
    """Measure, and print a table or a JSON document.

    Args:
        arguments: command-line arguments.
        settings: cache folder of the built kernels.
        environment: environment of this process.
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
        print("trainer kernels bench: --device cuda: torch finds no GPU here; leave --device out", file=sys.stderr)
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
        description="Time every operation, forward and backward, on every available backend and in plain torch.",
    )
    parser.add_argument(
        "operation", nargs="*", metavar="NAME[=SIZE,...]", help="operation, such as rms_norm=4096x4096; default: all"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=_DTYPES,
        help="dtype of the activations; may be repeated; default: float32 and bfloat16",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the CPU, and a GPU if there is one")
    parser.add_argument("--threads", type=_count, default=1, metavar="N", help="CPU threads (1)")
    parser.add_argument("--repeats", type=_count, default=7, metavar="N", help="samples per median (7)")
    parser.add_argument(
        "--copy-mib", type=_count, default=256, metavar="N", help="size of the copied tensor in MiB (256)"
    )
    parser.add_argument("--forward", action="store_true", help="measure forward only")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of one thread, for busy machines")
    parser.add_argument("--as-is", action="store_true", help="keep the MALLOC_* settings of this environment")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST:,}")
    return int(text)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _requested(words: Sequence[str]) -> dict[str, list[tuple[int, ...]]] | str:
    """Operation -> sizes, empty for the usual sizes; or an error message."""
    from trainer.ops.tools.bench import BENCHES

    requested: dict[str, list[tuple[int, ...]]] = {name: [] for name in BENCHES} if not words else {}
    for word in words:
        name, named, text = word.partition("=")
        if name not in BENCHES:
            return f"{name!r} is not an operation; valid are {', '.join(BENCHES)}"
        bench = BENCHES[name]
        sizes = text.split(",") if named else []
        requested[name] = [tuple(int(part) if part.isdecimal() else 0 for part in size.split("x")) for size in sizes]
        if any(len(size) != len(bench.sizes[0]) or 0 in size for size in requested[name]):
            example = "x".join(map(str, bench.sizes[0]))
            return f"{word!r} has an invalid size; sizes of {name} are {bench.dims}, such as {example}"
    return requested


def _measured(
    options: argparse.Namespace, requested: Mapping[str, Sequence[tuple[int, ...]]], settings: BuildSettings
) -> dict[str, Any] | str:
    """Measure, and return the JSON document or an error message."""
    import torch

    from trainer.ops.tools.bench import Plan, copy_speed, measure

    torch.set_num_threads(options.threads)
    plan = Plan(options.repeats, options.copy_mib, options.cpu_time, options.forward)
    dtypes = [getattr(torch, name) for name in options.dtype or _DTYPES[:2]]
    names = [options.device] if options.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    copies, rows = {}, []
    for name in names:
        device = torch.device(name, 0) if name == "cuda" else torch.device(name)
        try:
            copies[name] = copy_speed(device, plan)
        except RuntimeError as error:  # such as out of memory
            return f"--copy-mib {plan.copy_mib} is too much: {str(error).splitlines()[0]}"
        for row in measure(requested, device, dtypes, plan, settings, copies[name]):
            rows.append(asdict(row))
            print(_progress(row), file=sys.stderr, flush=True)
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


def _driver() -> str | None:
    """Version of NVIDIA's driver: the first dotted number in its version file."""
    with suppress(OSError):
        found = re.search(r"\d+(\.\d+)+", _DRIVER.read_text(errors="replace"))
        return found[0] if found is not None else None
    return None


def _progress(row: Measurement) -> str:
    outcome = row.problem or f"{row.seconds * 1e3:.3f} ms"
    return f"{row.device} {row.dtype} {row.operation} {row.size} {row.backend}: {outcome}"


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
        f"median of {document['repeats']} by {document['clock']}; {allocator or 'glibc defaults, no MALLOC_* set'}"
    )
    for device, name in document["devices"].items():
        rows = [row for row in document["measurements"] if row["device"] == device]
        print(f"\n{name}: a copy moves {document['copy_gb_per_s'][device]:.1f} GB/s; * marks the choice of auto\n")
        print("\n".join(_aligned([COLUMNS, *(cells(row) for row in rows if not row["problem"])])))
        for line in problems(rows):
            print(line)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns: text to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            f"{text:<{width}}" if number < _WORDS else f"{text:>{width}}"
            for number, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Table cells of one measurement, by COLUMNS."""
    backend = f"{row['backend']} *" if row["is_chosen"] else row["backend"]
    figures = (f"{row['seconds'] * 1e3:.3f}", f"{row['gb_per_s']:.1f}", f"{row['of_copy']:.0%}")
    ratios = (f"{row[name]:.2f}" for name in ("of_reference", "of_plain"))
    return (row["operation"], row["size"], row["dtype"], backend, *figures, *ratios)


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Failed measurements, one line for each backend and reason."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row["problem"]:
            names.setdefault((row["backend"], row["problem"]), {})[row["operation"]] = None
    return [f"{backend} not measured for {', '.join(found)}: {why}" for (backend, why), found in names.items()]
