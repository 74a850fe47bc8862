"""The flash-attn package, versions 2 and 3; imported only after a successful trial.

Legend: B samples, A heads, S sequence, D head width.
Dao 2023 (arXiv:2307.08691), Shah et al. 2024 (arXiv:2407.08608). Version 2 is the package ``flash_attn``. Version 3 is
the package ``flash_attn_interface``, which is built from the ``hopper`` folder of the same repository.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Literal

import torch

from trainer.ops.attention.tiled import Gradients, Packing
from trainer.ops.attention.tiles import whole_tiles
from trainer.ops.build.packages import LIMIT_S, use_problem

Version = Literal[2, 3]
_MODULES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface"}
_AMPERE = (8, 0)
_HOPPER_MAJOR = 9
_MOST_WIDTH = 256
_VERSION_2_OFF = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}


class FlashAttnPackage:
    """Kernels of flash-attn for 16-bit dtypes and head widths in multiples of 8.

    Packed documents take one call.
    """

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
        self, packing: Packing, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PackedKernel."""
        output, log_sum_exp = self._forward([packing.tokens(part) for part in (query, key, value)], True, packing)
        return packing.heads(output), packing.by_sample(log_sum_exp)

    def backward_packed(self, packing: Packing, *tensors: torch.Tensor) -> Gradients:
        """See PackedKernel."""
        *heads, log_sum_exp = tensors
        grads = self._backward([*map(packing.tokens, heads), packing.by_token(log_sum_exp)], True, packing)
        return packing.heads(grads[0]), packing.heads(grads[1]), packing.heads(grads[2])

    def _forward(
        self, heads: Sequence[torch.Tensor], causal: bool, packing: Packing | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"softmax_scale": heads[0].shape[-1] ** -0.5, "causal": causal}
        if packing is not None:
            options |= _options(packing)
        name = "_flash_attn_forward"
        if self._version == 2:
            options |= {"dropout_p": 0.0, "return_softmax": False, **_VERSION_2_OFF}
            name = name if packing is None else "_flash_attn_varlen_forward"
        output, log_sum_exp, *_ = getattr(self._module, name)(*heads, **options)
        return output, log_sum_exp

    def _backward(self, tensors: Sequence[torch.Tensor], causal: bool, packing: Packing | None) -> Gradients:
        grads = tuple(heads.new_empty(heads.shape) for heads in tensors[1:4])
        scale, deterministic = tensors[1].shape[-1] ** -0.5, torch.are_deterministic_algorithms_enabled()
        if self._version == 3:
            sequences: tuple[Any, ...] = (None,) * 6
            if packing is not None:
                sequences = (packing.starts, packing.starts, None, None, packing.longest, packing.longest)
            # Positional arguments, because builds differ in the name of ``causal``.
            self._module._flash_attn_backward(*tensors, *sequences, *grads, scale, causal, deterministic=deterministic)
            return grads[0], grads[1], grads[2]
        options: dict[str, Any] = {"dropout_p": 0.0, "softmax_scale": scale, "causal": causal, **_VERSION_2_OFF}
        name = "_flash_attn_backward"
        if packing is not None:
            options |= _options(packing)
            name = "_flash_attn_varlen_backward"
        getattr(self._module, name)(*tensors, *grads, deterministic=deterministic, **options)
        return grads[0], grads[1], grads[2]


def _options(packing: Packing) -> dict[str, Any]:
    """Kernel arguments for packed documents, the same for queries and keys."""
    return {
        "cu_seqlens_q": packing.starts,
        "cu_seqlens_k": packing.starts,
        "max_seqlen_q": packing.longest,
        "max_seqlen_k": packing.longest,
    }


def _token_first(heads: torch.Tensor) -> torch.Tensor:
    """View [B, S, A, D] of [B, A, S, D], or the reverse."""
    return heads.transpose(1, 2)


@functools.cache
def find_flash_attn(
    version: Version, dtype: torch.dtype, head_dim: int, device: torch.device
) -> FlashAttnPackage | str:
    """The kernels of a version, or the reason for having none. Completes "flash-attn ...".

    For a single process. The ranks of a job agree through trainer.ops.dispatch.flash_attn_agreement.
    """
    problem = unsuited(version, dtype, head_dim, device) or try_in_process(version, dtype, head_dim, device)
    return load(version) if problem is None else problem


def unsuited(version: Version, dtype: torch.dtype, head_dim: int, device: torch.device) -> str | None:
    """Reason against a version that is known without running the package, or None.

    Examples: wrong device, unsupported dtype or head width, package not installed.
    """
    if device.type != "cuda":
        return f"runs only on NVIDIA GPUs, and the device is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "computes only in bf16 or fp16; set training.bf16: true"
    if head_dim % 8 or head_dim > _MOST_WIDTH:
        return f"needs a head width that is a multiple of 8 up to {_MOST_WIDTH}, not {head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if version == 2 and capability < _AMPERE:
        return f"needs compute capability {_dotted(_AMPERE)} or higher, and this GPU has {_dotted(capability)}"
    # The kernels are compiled for Hopper. On later GPUs a launch fails, and the package then ends the process.
    if version == 3 and capability[0] != _HOPPER_MAJOR:
        return (
            f"runs only on Hopper GPUs (compute capability {_HOPPER_MAJOR}.x), and this GPU has {_dotted(capability)}"
        )
    package = _MODULES[version].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"is not installed (no package {package})"
    return None


def try_in_process(
    version: Version, dtype: torch.dtype, head_dim: int, device: torch.device, limit_s: float = LIMIT_S
) -> str | None:
    """Try an installed version on a GPU in a separate process.

    A wheel for another torch or CUDA fails only when it is loaded or run, and may crash its process. Therefore every
    call is made once in a separate process.

    Returns:
        The reason for a failure, or None.
    """
    program = f"import torch\nfrom {__name__} import try_here\ntry_here({version}, {dtype}, {head_dim}, '{device}')\n"
    try:
        problem = use_problem(program, limit_s)
    except OSError as error:
        problem = f"the trial process cannot start: {error}"
    return None if problem is None else f"does not run here: {problem}"


def try_here(version: Version, dtype: torch.dtype, head_dim: int, device: str) -> None:
    """Make every call once in this process. Raises any error of the package."""
    kernels = FlashAttnPackage(version, importlib.import_module(_MODULES[version]))
    _try_out(kernels, torch.ones(1, 2, 16, head_dim, dtype=dtype, device=device))
    torch.cuda.synchronize(device)


def load(version: Version) -> FlashAttnPackage | str:
    """The kernels of a tried version, or the reason for a failed import."""
    try:
        return FlashAttnPackage(version, importlib.import_module(_MODULES[version]))
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return f"does not run here: {lines[0]}"


def _try_out(kernels: FlashAttnPackage, heads: torch.Tensor) -> None:
    """Make every call once with heads [1, 2, 16, D].

    Some builds lack a function or have other arguments.
    """
    output, log_sum_exp = kernels.forward(heads, heads, heads, causal=True)
    kernels.backward(output, heads, heads, heads, output, log_sum_exp, causal=True)
    packing = Packing.build(whole_tiles(16, [(0, 7, 16)]), 1, 16, heads.device)
    output, log_sum_exp = kernels.forward_packed(packing, heads, heads, heads)
    kernels.backward_packed(packing, output, heads, heads, heads, output, log_sum_exp)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
