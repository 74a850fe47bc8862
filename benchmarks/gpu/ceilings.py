"""Limits of one GPU: software, copies, matrix products and attention at the shapes of the models, as lines of JSON.

    python -m benchmarks.gpu.ceilings [--device cpu]

Each rate is the median over repetitions, timed by events of the device. Inputs are random, because products of zeros
are faster.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.speed import SHAPES, Shape
from trainer.process.device import device_name

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def seconds(run: Callable[[], Any], device: torch.device, repetitions: int = 10) -> float:
    """Median seconds of a call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repetitions):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def software(device: torch.device) -> dict[str, Any]:
    """Versions, memory, and the cost of a launch on the host."""
    small = torch.ones(16, device=device)
    start = time.perf_counter()
    for _ in range(2000):
        torch.add(small, small)
    host_us = (time.perf_counter() - start) / 2000 * 1e6
    found = {"what": "machine", "device": device_name(device), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "host_us_per_add": round(host_us, 2)}
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "memory_gib": memory / 2**30}
    return found


def copy(device: torch.device, size: int) -> dict[str, Any]:
    """Device-to-device copy, bytes read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return {"what": "copy", "gb_per_s": 2 * size / seconds(lambda: target.copy_(source), device) / 1e9}


def product(name: str, device: torch.device, m: int, n: int, k: int) -> dict[str, Any]:
    """[m, k] x [k, n] in bf16 as a linear layer computes it, and its weight gradient added into float32."""
    x, weight = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in ((m, k), (n, k)))
    gradient = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    main = torch.zeros(n, k, device=device)
    of = {"forward": lambda: F.linear(x, weight), "input_gradient": lambda: gradient @ weight}
    if device.type == "cuda":
        of["weight_gradient"] = lambda: torch.addmm(main, gradient.t(), x, out_dtype=torch.float32, out=main)
    rates = {which: 2 * m * n * k / seconds(run, device) / 1e12 for which, run in of.items()}
    return {"what": "product", "name": name, "m": m, "n": n, "k": k, "tflops": rates}


def products(name: str, shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    """The products of a layer and of the output layer."""
    tokens, width = shape.micro_batch * shape.sequence, shape.hidden // shape.heads
    sizes = {
        "qkv": ((shape.heads + 2 * shape.groups) * width, shape.hidden),
        "projection": (shape.hidden, shape.hidden),
        "fc1": (2 * shape.ffn, shape.hidden),
        "fc2": (shape.hidden, shape.ffn),
        "head": (shape.vocab, shape.hidden),
    }
    return [product(f"{name} {part}", device, tokens, *size) for part, size in sizes.items()]


def attention(name: str, shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    """Causal attention, forward and backward, by each of torch's kernels; half of the square counts."""
    width = shape.hidden // shape.heads
    heads = (shape.heads, shape.groups, shape.groups)
    q, k, v = (
        torch.randn(shape.micro_batch, count, shape.sequence, width, device=device, dtype=torch.bfloat16)
        for count in heads
    )
    forward = 2 * shape.micro_batch * shape.heads * shape.sequence**2 * width
    rows = []
    for backend, kernel in BACKENDS.items():
        row: dict[str, Any] = {"what": "attention", "name": name, "kernel": backend}
        try:
            with sdpa_kernel(kernel):
                rates = attention_rates(q, k, v, forward, device)
        except RuntimeError as error:
            rows.append(row | {"failure": str(error).splitlines()[0]})
        else:
            rows.append(row | {"tflops": rates})
    return rows


def attention_rates(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flops: float, device: torch.device
) -> dict[str, float]:
    """TFLOP/s of forward and of backward, which has 2.5 times the operations."""

    def run() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    result = run()
    gradient = torch.randn_like(result)
    backward_s = seconds(lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True), device)
    with torch.no_grad():
        forward_s = seconds(run, device)
    return {"forward": flops / forward_s / 1e12, "backward": 2.5 * flops / backward_s / 1e12}


def sustained(device: torch.device, size: int, duration_s: float) -> dict[str, Any]:
    """bf16 products over the last half of a time that warms the GPU up."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    end = time.perf_counter() + duration_s
    while time.perf_counter() < end:
        rates.append(2 * size**3 / seconds(lambda: a @ b, device) / 1e12)
    return {"what": "sustained", "size": size, "first": rates[0], "tflops": statistics.median(rates[len(rates) // 2 :])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=("1b", "3b"))
    flags = parser.parse_args()
    device = torch.device(flags.device)
    is_gpu = device.type == "cuda"

    def tell(found: dict[str, Any]) -> None:
        print(json.dumps(found), flush=True)

    tell(software(device))
    tell(copy(device, 2**32 if is_gpu else 2**20))
    for name in flags.models:
        for row in (*products(name, SHAPES[name], device), *attention(name, SHAPES[name], device)):
            tell(row)
        torch.cuda.empty_cache()
    tell(sustained(device, 8192 if is_gpu else 128, 8.0 if is_gpu else 0.1))


if __name__ == "__main__":
    sys.exit(main())
