"""Agreement of all ranks on a version of flash-attn, or on none.

Ranks with different kernels would diverge by rounding errors. One rank per node tries the installed versions in a
separate process before the rendezvous. A version that fails on one node is used on none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trainer.ops.attention.backend import flash_problem, flash_versions, no_flash, trial, why_no_flash
from trainer.ops.attention.flash_attn import FlashAttnPackage, Version, load, try_in_process
from trainer.ops.attention.torch_trial import try_run
from trainer.ops.build.packages import LIMIT_S
from trainer.ops.dispatch.selection import agreed_problems

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.config.train_config import TrainConfig
    from trainer.ops.dispatch.selection import KernelSelection

_SHARE_OF_TIMEOUT = 0.4
"""Share of the rendezvous timeout that the trials may take."""
_UNTRIED = "was not tried on every node"

Tried = Mapping[Version, str | None]
"""Tried version -> reason for its failure, or None."""


def try_flash_attn(config: TrainConfig, dtype: torch.dtype, device: torch.device) -> Tried:
    """Try the requested versions that suit the device, best first, until one works.

    One rank per node calls this function, before the rank uses its GPU: a GPU in exclusive mode admits one process.

    Args:
        config: the run's config.
        dtype: dtype of the activations.
        device: device of this rank.
    """
    limit_s = min(LIMIT_S, _SHARE_OF_TIMEOUT * 60.0 * config.parallel.distributed_timeout_minutes)
    deadline = time.monotonic() + limit_s
    tried: dict[Version, str | None] = {}
    for version in flash_versions(config.model):
        if flash_problem(version, config.model, dtype, device) is None:
            left_s = max(1.0, deadline - time.monotonic())
            tried[version] = try_in_process(version, dtype, *trial(config.model), device, left_s)
            if tried[version] is None:
                break
    return tried


def with_flash_attn(
    selection: KernelSelection, model: ModelConfig, dtype: torch.dtype, device: torch.device, tried: Tried | None
) -> KernelSelection:
    """Add the best version of flash-attn that all ranks have to a selection.

    Collective: all ranks of the job. The notes of the result name each installed version that is not used.

    Args:
        selection: selection of the kernels.
        model: the model config.
        dtype: dtype of the activations.
        device: device of this rank.
        tried: result of ``try_flash_attn``; None on ranks that did not call it.

    Raises:
        ConfigError: the config names flash and a rank cannot use it. Raised on all ranks.
    """
    reasons: dict[Version, str] = {}
    notes: list[str] = []
    for version in flash_versions(model):
        unsuited = _agreed(flash_problem(version, model, dtype, device), device)
        found = unsuited if unsuited is not None else _loaded(version, device, tried)
        if isinstance(found, FlashAttnPackage):
            return replace(
                selection, kernels=selection.kernels.with_flash_attn(found), notes=(*selection.notes, *notes)
            )
        reasons[version] = found
        if unsuited is None:
            notes.append(f"attention: not flash-attn {version}, which {found}")
    if not reasons:
        return selection
    why = why_no_flash(reasons)
    if model.attention_backend == "flash":
        raise no_flash(why)
    return replace(selection, kernels=selection.kernels.with_flash_attn(why), notes=(*selection.notes, *notes))


def with_torch_trial(
    selection: KernelSelection, config: TrainConfig, dtype: torch.dtype, device: torch.device
) -> KernelSelection:
    """Try torch's own attention if the run uses it, and add its kernel to the notes. After ``with_flash_attn``."""
    notes = try_run(config, selection.kernels.flash_attn, dtype, device)
    return replace(selection, notes=(*selection.notes, *notes)) if notes else selection


def _loaded(version: Version, device: torch.device, tried: Tried | None) -> FlashAttnPackage | str:
    """Load a version if it works on every node and loads on every rank.

    Collective: all ranks of the job.
    """
    problem = _agreed(None if tried is None else tried.get(version, _UNTRIED), device)
    if problem is not None:
        return problem
    found = load(version)
    return _agreed(found if isinstance(found, str) else None, device) or found


def _agreed(problem: str | None, device: torch.device) -> str | None:
    return agreed_problems({"flash-attn": problem}, device)["flash-attn"]
