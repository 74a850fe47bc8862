"""Matrix products of all experts of a rank, each with its own range of rows.

Legend: R rows sorted by expert, E experts of this rank.
torch's grouped kernels (torch.nn.functional.grouped_mm) read the ranges on the device: one launch for all experts, and
the host need not know how many rows an expert has. Everywhere else each expert has a product of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Offsets = Sequence[int] | torch.Tensor
"""E + 1 ascending numbers; expert e has the rows from offsets[e] to offsets[e + 1].

On the host: a product per expert. An int32 tensor on the rows' device: one launch for all experts.
"""


def has_grouped_kernel(rows: torch.Tensor, weight_shape: Sequence[int]) -> bool:
    """True if one launch can do all experts, forward and backward, without a copy to the host.

    Needs bfloat16, Hopper or Blackwell, and matrices whose rows and columns are a multiple of 16 bytes
    (check_valid_strides_and_return_transposed in GroupedMMUtils.h of PyTorch 2.13). Everywhere else torch's function
    is also a loop, and copies the offsets from the device first (_grouped_mm_cuda, _grouped_mm_fallback there).

    Args:
        rows: inputs of a product.
        weight_shape: E, ..., in; the dims between the first and the last make up ``out``.
    """
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or not len(rows):
        return False
    if weight_shape[-1] % 8 or torch.Size(weight_shape[1:-1]).numel() % 8:
        return False
    return torch.cuda.get_device_capability(rows.device)[0] in (9, 10)


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, offsets: Offsets) -> torch.Tensor:
    """[R, out]: each expert's range of ``rows`` [R, in] times its matrix of [E, in, out]."""
    if isinstance(offsets, torch.Tensor) and len(rows):
        return torch._grouped_mm(rows.contiguous(), matrices, offs=offsets[1:])
    products = rows.new_empty(len(rows), matrices.shape[2])
    if isinstance(offsets, torch.Tensor):
        return products
    for expert, (first, stop) in enumerate(zip(offsets, offsets[1:], strict=False)):
        # In generation most experts have no rows, and even an empty product takes time.
        if first < stop:
            torch.mm(rows[first:stop], matrices[expert], out=products[first:stop])
    return products


def grouped_outer(grad_output: torch.Tensor, inputs: torch.Tensor, offsets: Offsets) -> torch.Tensor:
    """[E, out, in]: ``grad_output_e^T @ inputs_e`` of every expert e, zero for an expert without rows.

    In the dtype of the factors: the grouped kernels sum in float32, and round each result once
    (_resolve_grouped_mm_out_dtype in GroupedMMUtils.h of PyTorch 2.13).

    Args:
        grad_output: [R, out].
        inputs: [R, in].
        offsets: ranges of the experts.
    """
    if not isinstance(offsets, torch.Tensor):
        pairs = zip(row_ranges(grad_output, offsets), row_ranges(inputs, offsets), strict=True)
        return torch.stack([grad_rows.t() @ rows for grad_rows, rows in pairs])
    if not len(inputs):
        return inputs.new_zeros(len(offsets) - 1, grad_output.shape[1], inputs.shape[1])
    # This order of the factors is the only one that takes ranges of any length, also none (GroupMMCommon.cuh).
    products = torch._grouped_mm(grad_output.contiguous().t(), inputs.contiguous(), offs=offsets[1:])
    if inputs.is_cuda and torch.cuda.get_device_capability(inputs.device)[0] == 10:
        # Blackwell's kernel leaves other numbers for an expert without rows (pytorch#172439).
        products.masked_fill_((offsets.diff() == 0)[:, None, None], 0.0)
    return products


def add_per_expert(outputs: torch.Tensor, addends: torch.Tensor, offsets: Offsets) -> None:
    """Add ``addends`` [E, out] in place, each to its expert's range of ``outputs`` [R, out]."""
    if isinstance(offsets, torch.Tensor):
        outputs.addmm_(_members(outputs, offsets), addends)
        return
    for rows, own in zip(row_ranges(outputs, offsets), addends, strict=True):
        rows += own


def sum_per_expert(rows: torch.Tensor, offsets: Offsets) -> torch.Tensor:
    """[E, out]: sum over each expert's range of ``rows`` [R, out]."""
    if isinstance(offsets, torch.Tensor):
        return _members(rows, offsets).t() @ rows
    return torch.stack([own.sum(0) for own in row_ranges(rows, offsets)])


def row_ranges(rows: torch.Tensor, offsets: Sequence[int]) -> list[torch.Tensor]:
    """Views of each expert's range."""
    return [rows[first:stop] for first, stop in zip(offsets, offsets[1:], strict=False)]


def _members(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[R, E] in the dtype of ``rows``: 1 where a row is in an expert's range, else 0."""
    numbers = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    return ((offsets[:-1] <= numbers) & (numbers < offsets[1:])).to(rows.dtype)
