"""Choice of the attention backend: the requested backend, or the best available."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from trainer.config.errors import ConfigError
from trainer.ops.attention.flash_attn import FlashAttnPackage, Version, find_flash_attn, unsuited
from trainer.ops.attention.interface import AttentionKernel
from trainer.ops.attention.kernels import torch_kernel
from trainer.ops.attention.padded import ALIGNED_WIDTH, fitted
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.unfused import Unfused
from trainer.planning.parts.attention import kernel_widths

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_KEY = "model.attention_backend"
_HOPPER = (9, 0)
_TRIED_WINDOW = 8


@dataclass(frozen=True)
class AttentionBackend:
    """Name and kernel of the attention backend of a run.

    Attributes:
        name: the backend.
        kernel: computes attention without dropout.
        keeps_scores: True if plain causal attention with dropout keeps its scores for backward.
    """

    name: Literal["flash", "fused", "unfused"]
    kernel: AttentionKernel
    keeps_scores: bool = False


def choose_backend(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, flash_attn: FlashAttnPackage | str | None = None
) -> AttentionBackend:
    """Choose the backend that ``model.attention_backend`` requests.

    Args:
        model: the model config.
        dtype: dtype of the activations.
        device: device of the activations.
        flash_attn: the package that all ranks have, or the reason for having none; None: this process searches for
            the package itself.

    Raises:
        ConfigError: the config names a backend that cannot run here.
    """
    requested = model.attention_backend
    if requested in ("unfused", "local"):
        return AttentionBackend("unfused", Unfused(), keeps_scores=True)
    # flash-attn is imported only for configs that may use it.
    if requested in ("flash", "auto"):
        flash = _find_flash(model, dtype, device) if flash_attn is None else flash_attn
        if isinstance(flash, FlashAttnPackage):
            return AttentionBackend("flash", fitted(flash, kernel_widths(model), ALIGNED_WIDTH))
        if requested == "flash":
            raise no_flash(flash)
    has_softcap = model.attn_logit_softcapping is not None
    fused = None if has_softcap else torch_kernel(dtype, kernel_widths(model), device)
    if fused is not None:
        return AttentionBackend("fused", fused)
    if requested == "fused" and has_softcap:
        raise ConfigError(_KEY, "torch's fused kernels have no attn_logit_softcapping; use flash, unfused or auto")
    if requested == "fused":
        raise ConfigError(
            _KEY,
            f"fused cannot run here: torch has no kernel for {str(dtype).removeprefix('torch.')} on this {device.type} "
            "device; use unfused or auto",
        )
    return AttentionBackend("unfused", Unfused())


def check_backend(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Check the requested backend as far as possible without running flash-attn.

    Raises:
        ConfigError: the config names a backend that cannot run here.
    """
    if model.attention_backend != "flash":
        choose_backend(model, dtype, device, "is not requested")
        return
    problems = {version: flash_problem(version, model, dtype, device) for version in flash_versions(model)}
    reasons = {version: problem for version, problem in problems.items() if problem is not None}
    if len(reasons) == len(problems):
        raise no_flash(why_no_flash(reasons))


def flash_versions(model: ModelConfig) -> tuple[Version, ...]:
    """Versions of flash-attn that a model may run on, best first; none if all its attention has a bias or mask."""
    is_asked = model.attention_backend in ("flash", "auto")
    return (3, 2) if is_asked and not model.is_encoder_decoder else ()


def flash_problem(version: Version, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason against a trial of a version, or None. Completes "flash-attn ..."."""
    problem = unsuited(version, dtype, max(kernel_widths(model)), device)
    # On Hopper, version 2 reaches 35% utilization (Shah et al. 2024, arXiv:2407.08608, abstract), and torch may choose
    # cuDNN's kernel. Before Hopper, version 2 is the same kernel as torch's, and also packs documents in one call.
    if problem is None and version == 2 and model.attention_backend == "auto":
        is_hopper = torch.cuda.get_device_capability(device) >= _HOPPER
        problem = "is slower than torch's kernel on this GPU" if is_hopper else None
    return problem


def trial(model: ModelConfig) -> tuple[tuple[int, int], AttentionSettings]:
    """Head widths and settings with which a version of flash-attn is tried for a model: with its window, if any."""
    window = None if model.window_size is None else min(model.window_size, _TRIED_WINDOW)
    return kernel_widths(model), replace(AttentionSettings.of(model, 0), window=window)


def why_no_flash(reasons: Mapping[Version, str]) -> str:
    """Join the reasons of all versions. Completes "flash-attn ..."."""
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return ", and ".join(f"flash-attn {version} {reason}" for version, reason in reasons.items())


def no_flash(why: str) -> ConfigError:
    """Error for a config that names flash."""
    return ConfigError(_KEY, f"flash cannot run here: {why}; use fused, torch's own kernel, or auto")


def _find_flash(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> FlashAttnPackage | str:
    """The newest version that works here, or the reasons for having none."""
    reasons: dict[Version, str] = {}
    for version in flash_versions(model):
        problem = flash_problem(version, model, dtype, device)
        found = find_flash_attn(version, dtype, *trial(model), device) if problem is None else problem
        if isinstance(found, FlashAttnPackage):
            return found
        reasons[version] = found
    return why_no_flash(reasons)
