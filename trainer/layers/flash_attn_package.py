"""The flash-attn package, versions 2 and 3, where it is installed and able; nothing of it is imported before.

Legend: B samples, A heads, S sequence, D head width, N = B x S.
Dao 2023 (arXiv:2307.08691), Shah et al. 2024 (arXiv:2407.08608). Version 2 is ``flash_attn``, version 3, which is built
from the ``hopper`` folder of the same repository, ``flash_attn_interface``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer.context_parallel.ring import Gradients
from trainer.context_parallel.tiles import Tile

Version = Literal[2, 3]
_MODULES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface"}
_LEAST_CAPABILITY = {2: (8, 0), 3: (9, 0)}
_MOST_WIDTH = 256
_VERSION_2_OFF = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}


class FlashAttnPackage:
    """Kernels of flash-attn: 16 bit, head widths that are multiples of 8. Packed documents take one call."""

    def __init__(self, version: Version, module: Any) -> None:
        self._version = version
        self._module = module

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        output, log_sum_exp = self._forward([_token_first(heads) for heads in (query, key, value)], causal, None)
        return _token_first(output), log_sum_exp

    def backward(self, *tensors: torch.Tensor, causal: bool) -> Gradients:
        """See AttentionKernel."""
        *heads, log_sum_exp = tensors
        grads = self._backward([*map(_token_first, heads), log_sum_exp.contiguous()], causal, None)
        return _token_first(grads[0]), _token_first(grads[1]), _token_first(grads[2])

    def forward_packed(
        self, tiles: tuple[Tile, ...], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PackedKernel."""
        batch, _, length, _ = query.shape
        heads = [_token_first(part).flatten(0, 1) for part in (query, key, value)]
        output, log_sum_exp = self._forward(heads, True, _packing(tiles, batch, length, query.device))
        by_sample = log_sum_exp.view(-1, batch, length).transpose(0, 1)  # [B, A, S] from [A, N]
        return _token_first(output.view(batch, length, *output.shape[1:])), by_sample

    def backward_packed(self, tiles: tuple[Tile, ...], *tensors: torch.Tensor) -> Gradients:
        """See PackedKernel."""
        *heads, log_sum_exp = tensors
        batch, _, length, _ = heads[0].shape
        packed = [_token_first(part).flatten(0, 1) for part in heads]
        packed.append(log_sum_exp.transpose(0, 1).flatten(1).contiguous())  # [A, N]
        grads = self._backward(packed, True, _packing(tiles, batch, length, log_sum_exp.device))
        query, key, value = (_token_first(grad.view(batch, length, *grad.shape[1:])) for grad in grads)
        return query, key, value

    def _forward(
        self, heads: Sequence[torch.Tensor], causal: bool, packing: _Packing | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"softmax_scale": heads[0].shape[-1] ** -0.5, "causal": causal}
        if packing is not None:
            options |= packing.options()
        name = "_flash_attn_forward"
        if self._version == 2:
            options |= {"dropout_p": 0.0, "return_softmax": False, **_VERSION_2_OFF}
            name = name if packing is None else "_flash_attn_varlen_forward"
        output, log_sum_exp, *_ = getattr(self._module, name)(*heads, **options)
        return output, log_sum_exp

    def _backward(self, tensors: Sequence[torch.Tensor], causal: bool, packing: _Packing | None) -> Gradients:
        grads = tuple(heads.new_empty(heads.shape) for heads in tensors[1:4])
        scale, deterministic = tensors[1].shape[-1] ** -0.5, torch.are_deterministic_algorithms_enabled()
        if self._version == 3:
            sequences: tuple[Any, ...] = (None,) * 6
            if packing is not None:
                sequences = (packing.starts, packing.starts, None, None, packing.longest, packing.longest)
            # By place, because builds differ in the name of the last of these.
            self._module._flash_attn_backward(*tensors, *sequences, *grads, scale, causal, deterministic=deterministic)
            return grads[0], grads[1], grads[2]
        options: dict[str, Any] = {"dropout_p": 0.0, "softmax_scale": scale, "causal": causal, **_VERSION_2_OFF}
        name = "_flash_attn_backward"
        if packing is not None:
            options |= packing.options()
            name = "_flash_attn_varlen_backward"
        getattr(self._module, name)(*tensors, *grads, deterministic=deterministic, **options)
        return grads[0], grads[1], grads[2]


@dataclass(frozen=True)
class _Packing:
    """Documents one behind the other, along the tokens of all samples."""

    starts: torch.Tensor
    """Where each begins, int32, and at the end the number of tokens."""
    longest: int

    def options(self) -> dict[str, Any]:
        """As arguments of a kernel, the same for queries and keys."""
        return {
            "cu_seqlens_q": self.starts,
            "cu_seqlens_k": self.starts,
            "max_seqlen_q": self.longest,
            "max_seqlen_k": self.longest,
        }


def _packing(tiles: tuple[Tile, ...], batch: int, length: int, device: torch.device) -> _Packing:
    starts = [
        sample * length + tile.query[0] for sample in range(batch) for tile in tiles if tile.sample in (None, sample)
    ]
    longest = max(stop - start for start, stop in (tile.query for tile in tiles))
    return _Packing(torch.tensor([*starts, batch * length], dtype=torch.int32, device=device), longest)


def _token_first(heads: torch.Tensor) -> torch.Tensor:
    """[B, S, A, D] from [B, A, S, D], or back: a view."""
    return heads.transpose(1, 2)


@functools.cache
def find_flash_attn(
    version: Version, dtype: torch.dtype, head_dim: int, device: torch.device
) -> FlashAttnPackage | str:
    """The kernels of that version, or why they cannot be used: the end of a sentence that begins with their name."""
    if device.type != "cuda":
        return f"runs on NVIDIA GPUs alone, and the device is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "computes in bf16 or fp16 alone; switch training.bf16 on"
    if head_dim % 8 or head_dim > _MOST_WIDTH:
        return f"takes heads of up to {_MOST_WIDTH} channels in multiples of 8, not {head_dim}"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY[version]:
        return f"needs compute capability {'.'.join(map(str, _LEAST_CAPABILITY[version]))}, which this GPU is below"
    package = _MODULES[version].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"is not installed (no package {package})"
    # A wheel for another torch or CUDA fails only when it is loaded or run.
    try:
        kernels = FlashAttnPackage(version, importlib.import_module(_MODULES[version]))
        heads = torch.ones(1, 2, 16, head_dim, dtype=dtype, device=device)
        output, log_sum_exp = kernels.forward(heads, heads, heads, causal=True)
        kernels.backward(output, heads, heads, heads, output, log_sum_exp, causal=True)
        torch.cuda.synchronize(device)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return f"does not run here: {lines[0]}"
    return kernels
