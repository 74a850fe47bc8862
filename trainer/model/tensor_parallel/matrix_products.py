"""Products of activations and weights, by the faster of torch's two CPU libraries.

On CPUs torch gives float32 matrices to MKL. On AMD processors oneDNN, which torch also contains, is faster: forward and
the input gradient of 512 x 512 by 512 x 1,536 reach 107 instead of 100 GFLOP/s, products of 2,048 x 2,048 matrices 109
instead of 94, on one core of an EPYC (torch 2.13.0, MKL 2024.2, oneDNN 3.12). Weight gradients stay with MKL, which
adds them to the existing gradient.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

_LEAST_ROWS = 128
_LEAST_CHANNELS = 256
"""Smaller products take less time than the preparation of oneDNN, which costs 0.5 ms for each new shape."""


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``rows @ weight^T + bias``, not differentiable.

    The library depends on the shapes and the processor alone, so that runs can be repeated.

    Args:
        rows: [..., in].
        weight: [out, in], of any strides.
        bias: [out].
    """
    if _is_for_onednn(rows, weight):
        return product_by_onednn(rows, weight, bias)
    if bias is not None and rows.dim() > 2:
        # F.linear gives a view of the same result.
        return _shaped(torch.addmm(bias, rows.reshape(-1, rows.shape[-1]), weight.t()), rows)
    return F.linear(rows, weight, bias)


def product_by_onednn(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``product`` by oneDNN; float32 on CPUs."""
    flat = rows.reshape(-1, rows.shape[-1])
    outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    return _shaped(outputs, rows)


def _shaped(outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The outputs [N, out] of ``rows`` [..., in] as [..., out]."""
    # Not a view: autograd forbids in-place changes of a view that a custom function returns, and the loss overwrites
    # the logits.
    return outputs.resize_((*rows.shape[:-1], outputs.shape[1]))


def _is_for_onednn(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        rows.dtype == weight.dtype == torch.float32
        and rows.device.type == "cpu"
        and min(weight.shape) >= _LEAST_CHANNELS
        and rows.numel() >= _LEAST_ROWS * rows.shape[-1]
        and is_onednn_faster()
    )


@cache
def is_onednn_faster() -> bool:
    """True on an AMD processor with AVX-512 and a torch with oneDNN.

    Environment variables of torch and oneDNN (``ATEN_CPU_CAPABILITY``) that turn AVX-512 off turn this off, too.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not _has_onednn():
        return False
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in described


def _has_onednn() -> bool:
    is_there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_there and hasattr(torch.ops.mkldnn, "_linear_pointwise")
