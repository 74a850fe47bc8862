"""Whether the ranks of a job run attention on flash-attn, and which version: all of them, or none.

Ranks that computed by different kernels would drift apart by roundings. What is there is tried once per node, before
the ranks meet, in a process of its own; what fails anywhere is out everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trainer.ops.attention.backend import flash_problem, flash_versions, no_flash, why_no_flash
from trainer.ops.attention.flash_attn import FlashAttnPackage, Version, load, try_in_process
from trainer.ops.build.packages import LIMIT_S
from trainer.ops.dispatch.selection import agreed_problems

if TYPE_CHECKING:
    from trainer.config.sections import ModelConfig
    from trainer.config.train_config import TrainConfig
    from trainer.ops.dispatch.selection import KernelSelection

_SHARE_OF_TIMEOUT = 0.4
"""Of the time that the other ranks wait for the first to meet them."""
_UNTRIED = "was not tried on every node"

Tried = Mapping[Version, str | None]
"""Version that was tried -> what is wrong with it."""


def try_flash_attn(config: TrainConfig, dtype: torch.dtype, device: torch.device) -> Tried:
    """Try what the config wants and what suits the device, best first, until one works. For one rank of a node.

    Best before this process uses its GPU: some let one process in at a time.

    Args:
        config: says which attention, and how long ranks wait for each other.
        dtype: of the activations.
        device: of this rank.
    """
    limit_s = min(LIMIT_S, _SHARE_OF_TIMEOUT * 60.0 * config.parallel.distributed_timeout_minutes)
    deadline = time.monotonic() + limit_s
    tried: dict[Version, str | None] = {}
    for version in flash_versions(config.model):
        if flash_problem(version, config.model, dtype, device) is None:
            left_s = max(1.0, deadline - time.monotonic())
            tried[version] = try_in_process(version, dtype, config.model.head_dim, device, left_s)
            if tried[version] is None:
                break
    return tried


def with_flash_attn(
    selection: KernelSelection, model: ModelConfig, dtype: torch.dtype, device: torch.device, tried: Tried | None
) -> KernelSelection:
    """The same with the version of flash-attn that all ranks have; a line tells of one that is there and not used.

    Collective over all ranks of the job.

    Args:
        selection: of the kernels.
        model: says which attention.
        dtype: of the activations.
        device: of this rank.
        tried: by ``try_flash_attn``; None on a rank for whose node another one has done so.

    Raises:
        ConfigError: it is asked for by name and some rank cannot have it; on all ranks alike.
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


def _loaded(version: Version, device: torch.device, tried: Tried | None) -> FlashAttnPackage | str:
    """A version that suits every rank, in this process, if it works on every node and loads on every rank."""
    problem = _agreed(None if tried is None else tried.get(version, _UNTRIED), device)
    if problem is not None:
        return problem
    found = load(version)
    return _agreed(found if isinstance(found, str) else None, device) or found


def _agreed(problem: str | None, device: torch.device) -> str | None:
    return agreed_problems({"flash-attn": problem}, device)["flash-attn"]
