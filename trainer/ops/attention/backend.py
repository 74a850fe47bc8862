"""Which kernels attention runs on: asked for by name, or the best that is able."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from trainer.config.errors import ConfigError
from trainer.ops.attention.flash_attn import FlashAttnPackage, Version, find_flash_attn, unsuited
from trainer.ops.attention.kernels import Unfused, torch_kernel
from trainer.ops.attention.tiled import AttentionKernel

if TYPE_CHECKING:
    from trainer.config.sections import ModelConfig

_KEY = "model.attention_backend"
_HOPPER = (9, 0)


@dataclass(frozen=True)
class AttentionBackend:
    """What attention is computed with."""

    name: Literal["flash", "fused", "unfused"]
    kernel: AttentionKernel


def choose_backend(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, flash_attn: FlashAttnPackage | str | None = None
) -> AttentionBackend:
    """The backend that ``model.attention_backend`` names for activations of ``dtype`` on ``device``.

    Args:
        model: says which.
        dtype: of the activations.
        device: of the activations.
        flash_attn: the one that all ranks have, or why there is none; None: this process looks for it by itself.

    Raises:
        ConfigError: it is asked for by name and unable.
    """
    requested = model.attention_backend
    if requested in ("unfused", "local"):
        return AttentionBackend("unfused", Unfused())
    # Nothing of flash-attn is imported for whoever asks for something else.
    if requested in ("flash", "auto"):
        flash = _find_flash(model, dtype, device) if flash_attn is None else flash_attn
        if isinstance(flash, FlashAttnPackage):
            return AttentionBackend("flash", flash)
        if requested == "flash":
            raise no_flash(flash)
    fused = torch_kernel(dtype, model.head_dim, device)
    if fused is not None:
        return AttentionBackend("fused", fused)
    if requested == "fused":
        raise ConfigError(
            _KEY,
            f"fused is unable: torch has no kernel for {str(dtype).removeprefix('torch.')} on this {device.type} "
            "device; use unfused or auto",
        )
    return AttentionBackend("unfused", Unfused())


def check_backend(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what a rank can tell to be impossible before anything of flash-attn has run.

    Raises:
        ConfigError: a backend is asked for by name and unable.
    """
    if model.attention_backend != "flash":
        choose_backend(model, dtype, device, "is not asked for")
        return
    problems = {version: flash_problem(version, model, dtype, device) for version in flash_versions(model)}
    reasons = {version: problem for version, problem in problems.items() if problem is not None}
    if len(reasons) == len(problems):
        raise no_flash(why_no_flash(reasons))


def flash_versions(model: ModelConfig) -> tuple[Version, ...]:
    """The versions of flash-attn that a model may run on, best first."""
    return (3, 2) if model.attention_backend in ("flash", "auto") else ()


def flash_problem(version: Version, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a version is not to be tried; the end of a sentence that begins with its name."""
    problem = unsuited(version, dtype, model.head_dim, device)
    # Version 2 reaches 35% of a Hopper GPU (Shah et al. 2024, arXiv:2407.08608, abstract), where torch's own choice
    # may be cuDNN's kernel; before Hopper it is the same kernel as torch's, with packed documents in one call besides.
    if problem is None and version == 2 and model.attention_backend == "auto":
        is_hopper = torch.cuda.get_device_capability(device) >= _HOPPER
        problem = "is slower than torch's own on this GPU" if is_hopper else None
    return problem


def why_no_flash(reasons: Mapping[Version, str]) -> str:
    """One reason out of that of every version; the end of a sentence that begins with flash or flash-attn."""
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return ", and ".join(f"flash-attn {version} {reason}" for version, reason in reasons.items())


def no_flash(why: str) -> ConfigError:
    """For whom flash was asked for by name."""
    return ConfigError(_KEY, f"flash is unable: {why}; use fused, which is torch's own, or auto")


def _find_flash(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> FlashAttnPackage | str:
    """The newest version that is able; else the reasons why none is."""
    reasons: dict[Version, str] = {}
    for version in flash_versions(model):
        problem = flash_problem(version, model, dtype, device)
        found = find_flash_attn(version, dtype, model.head_dim, device) if problem is None else problem
        if isinstance(found, FlashAttnPackage):
            return found
        reasons[version] = found
    return why_no_flash(reasons)
