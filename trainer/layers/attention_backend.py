"""Which kernels attention runs on: asked for by name, or the best that is able."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from trainer.config_error import ConfigError
from trainer.layers.attention_kernels import Unfused, torch_kernel
from trainer.layers.flash_attn_package import FlashAttnPackage, find_flash_attn
from trainer.layers.tiled_attention import AttentionKernel

if TYPE_CHECKING:
    from trainer.config import ModelConfig

_KEY = "model.attention_backend"
_HOPPER = (9, 0)


@dataclass(frozen=True)
class AttentionBackend:
    """What attention is computed with."""

    name: Literal["flash", "fused", "unfused"]
    kernel: AttentionKernel


def choose_backend(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The backend that ``model.attention_backend`` names for activations of ``dtype`` on ``device``.

    Raises:
        ConfigError: it is asked for by name and unable.
    """
    wanted = model.attention_backend
    if wanted in ("unfused", "local"):
        return AttentionBackend("unfused", Unfused())
    # Nothing of flash-attn is imported for whoever asks for something else.
    if wanted in ("flash", "auto"):
        flash = _flash(dtype, model.head_dim, device, by_name=wanted == "flash")
        if isinstance(flash, FlashAttnPackage):
            return AttentionBackend("flash", flash)
        if wanted == "flash":
            raise ConfigError(_KEY, f"flash is unable: {flash}; use fused, which is torch's own, or auto")
    fused = torch_kernel(dtype, model.head_dim, device)
    if fused is not None:
        return AttentionBackend("fused", fused)
    if wanted == "fused":
        raise ConfigError(
            _KEY,
            f"fused is unable: torch has no kernel for {str(dtype).removeprefix('torch.')} on this {device.type} "
            "device; use unfused or auto",
        )
    return AttentionBackend("unfused", Unfused())


def _flash(dtype: torch.dtype, head_dim: int, device: torch.device, *, by_name: bool) -> FlashAttnPackage | str:
    """The newest version that is able; else the reasons why none is."""
    newest = find_flash_attn(3, dtype, head_dim, device)
    if isinstance(newest, FlashAttnPackage):
        return newest
    # Version 2 reaches 35% of a Hopper GPU (Shah et al. 2024, arXiv:2407.08608, abstract), where torch's own choice
    # may be cuDNN's kernel; before Hopper it is the same kernel as torch's, with packed documents in one call besides.
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER
    if is_hopper and not by_name:
        return newest
    second = find_flash_attn(2, dtype, head_dim, device)
    if isinstance(second, FlashAttnPackage):
        return second
    return second if second == newest else f"flash-attn 3 {newest}, and flash-attn 2 {second}"
