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
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from trainer.ops.attention.interface import AttentionKernel, Gradients, PackedKernel, Packing
from trainer.ops.attention.padded import ALIGNED_WIDTH, fitted
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.tiles import Band, whole_tiles
from trainer.ops.build.packages import LIMIT_S, use_problem

Version = Literal[2, 3]
_MODULES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface"}
_AMPERE = (8, 0)
_HOPPER_MAJOR = 9
_MOST_WIDTH = 256


class FlashAttnPackage:
    """Kernels of flash-attn for 16-bit dtypes and head widths D = V in multiples of 8.

    Packed documents take one call.
    """

    def __init__(self, version: Version, module: Any) -> None:
        self._version = version
        self._module = module

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, settings: AttentionSettings, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        mask = _Mask.of(band.sides(query.shape[2], key.shape[2]), settings)
        output, log_sum_exp = self._forward([_token_first(heads) for heads in (query, key, value)], mask, None)
        return _token_first(output), log_sum_exp

    def backward(self, *tensors: torch.Tensor, settings: AttentionSettings, band: Band) -> Gradients:
        """See AttentionKernel."""
        *heads, log_sum_exp = tensors
        mask = _Mask.of(band.sides(heads[1].shape[2], heads[2].shape[2]), settings)
        grads = self._backward([*map(_token_first, heads), log_sum_exp.contiguous()], mask, None)
        return _token_first(grads[0]), _token_first(grads[1]), _token_first(grads[2])

    def forward_packed(
        self,
        packing: Packing,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        settings: AttentionSettings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PackedKernel."""
        heads = [packing.tokens(part) for part in (query, key, value)]
        output, log_sum_exp = self._forward(heads, _Mask.packed(settings), packing)
        return packing.heads(output), packing.by_sample(log_sum_exp)

    def backward_packed(self, packing: Packing, *tensors: torch.Tensor, settings: AttentionSettings) -> Gradients:
        """See PackedKernel."""
        *heads, log_sum_exp = tensors
        tokens = [*map(packing.tokens, heads), packing.by_token(log_sum_exp)]
        grads = self._backward(tokens, _Mask.packed(settings), packing)
        return packing.heads(grads[0]), packing.heads(grads[1]), packing.heads(grads[2])

    def _forward(
        self, heads: Sequence[torch.Tensor], mask: _Mask, packing: Packing | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"softmax_scale": mask.scale, "causal": mask.causal}
        if packing is not None:
            options |= _options(packing)
        name = "_flash_attn_forward"
        if self._version == 2:
            options |= {"dropout_p": 0.0, "return_softmax": False, "alibi_slopes": None, **mask.window, **mask.softcap}
            name = name if packing is None else "_flash_attn_varlen_forward"
        else:
            options |= mask.used
        output, log_sum_exp, *_ = getattr(self._module, name)(*heads, **options)
        return output, log_sum_exp

    def _backward(self, tensors: Sequence[torch.Tensor], mask: _Mask, packing: Packing | None) -> Gradients:
        grads = tuple(heads.new_empty(heads.shape) for heads in tensors[1:4])
        deterministic = torch.are_deterministic_algorithms_enabled()
        if self._version == 3:
            sequences: tuple[Any, ...] = (None,) * 6
            if packing is not None:
                sequences = (packing.starts, packing.starts, None, None, packing.longest, packing.longest)
            # Positional arguments, because builds differ in the name of ``causal``.
            arguments = (*tensors, *sequences, *grads, mask.scale, mask.causal)
            self._module._flash_attn_backward(*arguments, deterministic=deterministic, **mask.used)
            return grads[0], grads[1], grads[2]
        options: dict[str, Any] = {"dropout_p": 0.0, "softmax_scale": mask.scale, "causal": mask.causal}
        options |= {"alibi_slopes": None, **mask.window, **mask.softcap}
        name = "_flash_attn_backward"
        if packing is not None:
            options |= _options(packing)
            name = "_flash_attn_varlen_backward"
        getattr(self._module, name)(*tensors, *grads, deterministic=deterministic, **options)
        return grads[0], grads[1], grads[2]


class _Mask(NamedTuple):
    """Scores and mask of a call, in the package's words."""

    scale: float
    cap: float | None
    left: int
    right: int

    @classmethod
    def of(cls, sides: tuple[int, int], settings: AttentionSettings) -> _Mask:
        return cls(settings.scale, settings.softcap, *sides)

    @classmethod
    def packed(cls, settings: AttentionSettings) -> _Mask:
        return cls.of((-1 if settings.window is None else settings.window - 1, 0 if settings.causal else -1), settings)

    @property
    def causal(self) -> bool:
        # Without a window on the left: with one, the right side alone says the same, in all versions.
        return self.right == 0 and self.left == -1

    @property
    def window(self) -> dict[str, int]:
        right = -1 if self.causal else self.right
        return {"window_size_left": self.left, "window_size_right": right}

    @property
    def softcap(self) -> dict[str, float]:
        return {"softcap": self.cap or 0.0}

    @property
    def used(self) -> dict[str, Any]:
        """Only what is in use: older builds of version 3 lack the others."""
        has_window = not self.causal and (self.left, self.right) != (-1, -1)
        return {**(self.window if has_window else {}), **(self.softcap if self.cap else {})}


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
    version: Version, dtype: torch.dtype, widths: tuple[int, int], settings: AttentionSettings, device: torch.device
) -> FlashAttnPackage | str:
    """The kernels of a version, or the reason for having none. Completes "flash-attn ...".

    For a single process. The ranks of a job agree through trainer.ops.dispatch.flash_attn_agreement.
    """
    problem = unsuited(version, dtype, max(widths), device)
    problem = problem or try_in_process(version, dtype, widths, settings, device)
    return load(version) if problem is None else problem


def unsuited(version: Version, dtype: torch.dtype, width: int, device: torch.device) -> str | None:
    """Reason against a version that is known without running the package, or None.

    Examples: wrong device, unsupported dtype or head width, package not installed.
    """
    if device.type != "cuda":
        return f"runs only on NVIDIA GPUs, and the device is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "computes only in bf16 or fp16; set training.bf16: true"
    if width % ALIGNED_WIDTH or width > _MOST_WIDTH:
        return f"needs a head width that is a multiple of {ALIGNED_WIDTH} up to {_MOST_WIDTH}, not {width}"
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
    version: Version,
    dtype: torch.dtype,
    widths: tuple[int, int],
    settings: AttentionSettings,
    device: torch.device,
    limit_s: float = LIMIT_S,
) -> str | None:
    """Try an installed version on a GPU in a separate process.

    A wheel for another torch or CUDA fails only when it is loaded or run, and may crash its process. Therefore every
    call is made once in a separate process, with and without the window of ``settings``.

    Returns:
        The reason for a failure, or None.
    """
    call = f"try_here({version}, {dtype}, {widths}, {settings}, '{device}')"
    imports = f"from {__name__} import try_here\nfrom {AttentionSettings.__module__} import AttentionSettings\n"
    try:
        problem = use_problem(f"import torch\n{imports}{call}\n", limit_s)
    except OSError as error:
        problem = f"the trial process cannot start: {error}"
    return None if problem is None else f"does not run here: {problem}"


def try_here(
    version: Version, dtype: torch.dtype, widths: tuple[int, int], settings: AttentionSettings, device: str
) -> None:
    """Make every call once in this process. Raises any error of the package."""
    package = FlashAttnPackage(version, importlib.import_module(_MODULES[version]))
    query, value = (torch.ones(1, 2, 16, width, dtype=dtype, device=device) for width in widths)
    for one in {settings, replace(settings, window=None)}:
        _try_out(fitted(package, widths, ALIGNED_WIDTH), query, value, one)
    torch.cuda.synchronize(device)


def load(version: Version) -> FlashAttnPackage | str:
    """The kernels of a tried version, or the reason for a failed import."""
    try:
        return FlashAttnPackage(version, importlib.import_module(_MODULES[version]))
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return f"does not run here: {lines[0]}"


def _try_out(kernels: AttentionKernel, query: torch.Tensor, value: torch.Tensor, settings: AttentionSettings) -> None:
    """Make every call once with query and key [1, 2, 16, D] and value [1, 2, 16, V].

    Some builds lack a function or have other arguments.
    """
    assert isinstance(kernels, PackedKernel)
    heads = query, query, value
    (tile,) = whole_tiles(16, None, causal=settings.causal, window=settings.window)
    output, log_sum_exp = kernels.forward(*heads, settings=settings, band=tile.band)
    kernels.backward(output, *heads, output, log_sum_exp, settings=settings, band=tile.band)
    packing = Packing.build(whole_tiles(16, [(0, 7, 16)]), 1, 16, query.device)
    output, log_sum_exp = kernels.forward_packed(packing, *heads, settings=settings)
    kernels.backward_packed(packing, output, *heads, output, log_sum_exp, settings=settings)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
