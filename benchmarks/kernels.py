"""Speed of the native kernels beside torch and the reference, and beside a copy of memory.

    python -m trainer kernels build
    python -m benchmarks.kernels [NAME ...] [--device cuda] [--dtype bfloat16] [--json]

Times are medians of forward and backward, or of forward alone for an op without a backward. GB/s count the least bytes
that both must read and write if the op keeps only its inputs, its results and one number per row. On a CPU the
allocator has the settings of jobs: otherwise page faults of large tensors are the most of it.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.train_speed import ENVIRONMENT, processor
from trainer.ops.adamw import AdamWConstants
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.dispatch.registry import OPERATIONS
from trainer.ops.dispatch.selection import implementation_problem
from trainer.ops.dispatch.setup import KernelSetup
from trainer.ops.loss_terms import LossTerms, VocabColumns
from trainer.ops.operation import BACKENDS
from trainer.planning.kernel_choice import RequestedBackend

LARGE, TIMES_FOR_GPU = 1 << 20, 8
"""Elements of a large size, and its factor on GPUs: one finishes 4096 x 4096 before Python launches the next call."""


@dataclass(frozen=True)
class _Draw:
    """Random tensors of a dtype on a device."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def leaf(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.normal(*shape, dtype=dtype).requires_grad_()


Case = tuple[tuple[Any, ...], float, float]
"""Arguments; bytes that forward moves, and those that backward moves, as multiples of the first tensor's."""


def activation(draw: _Draw, tokens: int, parts: int, width: int) -> Case:
    """SwiGLU, or GeLU with a bias."""
    inner = draw.leaf(tokens, parts * width)
    if parts == 2:
        return (inner, None, None, "silu", True), 1.5, 2.5
    return (inner, draw.leaf(width), None, "gelu_tanh", False), 2, 3


def rope(draw: _Draw, length: int, heads: int, width: int) -> Case:
    angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, width, 2) / width))
    tables = (part.to(draw.device, draw.dtype).view(length, 1, 1, 1, -1) for part in (angles.cos(), angles.sin()))
    # Forward does not move the values; backward joins three gradients in one tensor.
    return (draw.leaf(length, 1, 3 * heads * width), 1, width, *tables), 4 / 3, 2


def adamw(draw: _Draw, count: int, gradient_bytes: int) -> Case:
    """Float32 masters and moments; copies of the weights in the dtype, unless it is float32."""
    masters, averages, squares = ([draw.normal(count, dtype=torch.float32)] for _ in range(3))
    squares[0].square_()
    grads = [draw.normal(count, dtype=torch.float32 if gradient_bytes == 4 else torch.bfloat16)]
    copies = [] if draw.dtype == torch.float32 else [draw.normal(count)]
    constants = AdamWConstants(1e-6, 0.9, 0.95, 1e-8, 0.1, step=3)
    moved = 6 + (gradient_bytes + sum(copy.itemsize for copy in copies)) / 4
    return (masters, grads, averages, squares, copies, constants), moved, 0


def bias_dropout_add(draw: _Draw, tokens: int, width: int) -> Case:
    hidden, bias, residual = draw.leaf(tokens, 1, width), draw.leaf(width), draw.leaf(tokens, 1, width)
    return (hidden, bias, residual, torch.arange(tokens, device=draw.device), 0.1, 1234567890123), 3, 2


def routes(draw: _Draw, tokens: int, per_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of experts in a random order, and the place of each choice."""
    choices = torch.randperm(tokens * per_token, device=draw.device)
    return choices, choices.argsort().view(tokens, per_token)


def moe_unpermute(draw: _Draw, tokens: int, per_token: int, width: int) -> Case:
    weights = draw.leaf(tokens, per_token, dtype=torch.promote_types(draw.dtype, torch.float32))
    rows = draw.leaf(tokens * per_token, width)
    return (rows, weights, *routes(draw, tokens, per_token)), 1 + 1 / per_token, 2 + 1 / per_token


def cross_entropy(draw: _Draw, tokens: int, vocabulary: int) -> Case:
    labels = torch.randint(vocabulary, (tokens,), device=draw.device)
    return (draw.leaf(tokens, vocabulary), labels, VocabColumns(0, vocabulary, vocabulary), LossTerms()), 1, 2


def scaled_masked_softmax(draw: _Draw, batch: int, heads: int, queries: int, keys: int) -> Case:
    mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=draw.device).triu(1)
    return (draw.leaf(batch, heads, queries, keys), mask, 0.125), 2, 3


ROWS, ROUTES, SCORES = ((4096, 4096), (64, 256)), ((4096, 2, 2048), (64, 2, 256)), ((1, 16, 1024, 1024), (1, 4, 64, 64))
CASES: Mapping[str, tuple[Callable[..., Case], Sequence[tuple[int, ...]]]] = {
    "rms_norm": (lambda draw, t, h: ((draw.leaf(t, h), draw.leaf(h), 1e-5), 2, 3), ROWS),
    "add_rms_norm": (lambda draw, t, h: ((draw.leaf(t, h), draw.leaf(t, h), draw.leaf(h), 1e-5), 4, 4), ROWS),
    "layer_norm": (lambda draw, t, h: ((draw.leaf(t, h), draw.leaf(h), draw.leaf(h), 1e-5), 2, 3), ROWS),
    "activation": (activation, ((4096, 2, 4096), (4096, 1, 4096), (64, 2, 256))),
    "rope": (rope, ((2048, 32, 128), (64, 4, 64))),
    "adamw": (adamw, ((1 << 24, 4), (1 << 24, 2), (1 << 12, 4))),
    "l2_norm": (lambda draw, count: (([draw.normal(count)],), 1, 0), ((1 << 24,), (1 << 12,))),
    "bias_dropout_add": (bias_dropout_add, ROWS),
    "moe_permute": (lambda draw, t, k, h: ((draw.leaf(t, h), *routes(draw, t, k)), 1 + k, 1 + k), ROUTES),
    "moe_unpermute": (moe_unpermute, ROUTES),
    "cross_entropy": (cross_entropy, ((512, 32768), (64, 1024))),
    "scaled_masked_softmax": (scaled_masked_softmax, SCORES),
    # Kernels do not read masked scores, and write zeros for them.
    "scaled_causal_softmax": (lambda draw, *size: ((draw.leaf(*size), 0.125), 1.5, 2), SCORES),
}
"""Op -> its arguments, and sizes: large ones, and one at which the overhead of a call is most of the time."""


def medians(calls: Mapping[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each call, with interleaved samples: a slow moment affects all calls."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def seconds(call: Callable[[], object], times: int) -> float:
        wait()
        began = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        return (time.perf_counter() - began) / times

    times = {}
    for name, call in calls.items():
        call()  # The first call allocates. Samples of calls shorter than 5 ms measure several of them.
        times[name] = max(1, int(0.005 / max(seconds(call, 1), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(seconds(call, times[name]))
    return {name: statistics.median(found) for name, found in samples.items()}


def copy_speed(device: torch.device, mib: int, repeats: int) -> float:
    """Bytes per second of a copy of memory, read plus written."""
    source = torch.ones(mib << 18, device=device)
    target = torch.empty_like(source).fill_(0.0)
    return 2 * source.nbytes / medians({"copy": lambda: target.copy_(source)}, device, repeats)["copy"]


def both_passes(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], None]:
    """A call of forward and, if there is one, backward."""
    leaves = [value for value in arguments if isinstance(value, torch.Tensor) and value.requires_grad]
    grads: list[torch.Tensor] = []

    def call() -> None:
        results = function(*arguments)
        outputs = [results] if isinstance(results, torch.Tensor) else list(results or ())
        outputs = [output for output in outputs if output.requires_grad]
        if not grads:
            grads.extend(torch.rand_like(output) for output in outputs)
        if outputs:
            torch.autograd.grad(outputs, leaves, grads)

    return call


def measured(
    name: str, draw: _Draw, missing: Mapping[str, str], copied: float, flags: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure the backends of an op. ``of_copy`` is the share of a copy's bytes per second."""
    operation = next(one for one in OPERATIONS if one.name == name)
    there = [one for one in BACKENDS if not implementation_problem(operation, one, draw.device, draw.dtype)]
    there = [one for one in there if one not in missing]
    make, sizes = CASES[name]
    for size in sizes:
        if draw.device.type == "cuda" and math.prod(size) >= LARGE:
            size = (TIMES_FOR_GPU * size[0], *size[1:])
        if flags.tiny:
            size = tuple(min(number, 8) for number in size)
        arguments, forward, backward = make(draw, *size)
        first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
        calls = {one: both_passes(operation.implementations[one].function, arguments) for one in there}
        found = medians(calls, draw.device, flags.repeats)
        for backend, seconds in found.items():
            speed = first.nbytes * (forward + backward) / seconds
            yield {
                **{"operation": name, "size": "x".join(map(str, size)), "backend": backend, "seconds": seconds},
                **{"gb_per_s": speed / 1e9, "of_copy": speed / copied, "of_reference": found["reference"] / seconds},
            }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The measurements as Markdown."""
    lines = ["| op | size | backend | us | GB/s | of copy | x reference |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        figures = (
            f"{row['seconds'] * 1e6:,.0f} | {row['gb_per_s']:.1f} | {row['of_copy']:.0%} | {row['of_reference']:.2f}"
        )
        lines.append(f"| {row['operation']} | {row['size']} | {row['backend']} | {figures} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a table or a JSON object. Returns 3 if the native kernels are not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="NAME", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU (1)")
    parser.add_argument("--repeats", type=int, default=7, help="samples of each median (7)")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that everything runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args(arguments)
    unknown = [name for name in flags.ops if name not in CASES]
    if unknown:
        parser.error(f"no such op: {', '.join(unknown)}; choose from {', '.join(CASES)}")
    torch.set_num_threads(flags.threads)
    device, names = torch.device(flags.device), flags.ops or list(CASES)
    auto = {name: RequestedBackend("auto", "training.kernel_backend", False) for name in names}
    missing = KernelSetup(BuildSettings.from_variables(os.environ), device).availability(auto).missing
    copied = copy_speed(device, 1 if flags.tiny else 256, flags.repeats)
    draw = _Draw(device, getattr(torch, flags.dtype))
    rows = [row for name in names for row in measured(name, draw, missing, copied, flags)]
    card = torch.cuda.get_device_name() if device.type == "cuda" else processor()
    if flags.json:
        head = {"torch": torch.__version__, "device": card, "dtype": flags.dtype, "copy_gb_per_s": copied / 1e9}
        print(json.dumps({**head, "missing": missing, "measurements": rows}))
    else:
        print(f"{card}, torch {torch.__version__}, {flags.dtype}; a copy moves {copied / 1e9:,.0f} GB/s.\n")
        print(table(rows))
    for backend, problem in missing.items():
        print(f"{backend} was not measured: {problem}", file=sys.stderr)
    return 3 if missing else 0


if __name__ == "__main__":
    if not ENVIRONMENT.items() <= os.environ.items():
        # The allocator reads its settings at the start of a process.
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]], os.environ | ENVIRONMENT)
    sys.exit(main(sys.argv[1:]))
