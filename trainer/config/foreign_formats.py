"""Recognition of models in other programs' formats by the names of their files. Pure and torch-free.

llmctl recognises a folder on the cluster with it before a job is queued, and the trainer when it reads the folder.
Names: megatron/training/checkpointing.py and megatron/core/dist_checkpointing of Megatron-LM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatch

HUB_CONFIG = "config.json"
NATIVE_METADATA = "metadata.json"
_LATEST = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_\d{7,}$|\.iter_\d{7,}\.old-\d+$")
_TENSORS, _RANKS, _COMMON, _DCP_METADATA = "*.distcp", "mp_rank_*", "common.pt", ".metadata"


@dataclass(frozen=True)
class Listing:
    """A folder as far as the recognition needs it.

    Attributes:
        names: of everything in the folder.
        iterations: name of each ``iter_*`` folder in it -> the names in that.
        config: text of its config.json, empty without one.
    """

    names: Collection[str]
    iterations: Mapping[str, Collection[str]] = field(default_factory=dict)
    config: str = ""

    @property
    def holds_checkpoints(self) -> bool:
        """True if the folder has an iteration, damaged or moved aside, or the pointer to one."""
        return any(name == _LATEST or _ITERATION.match(name) for name in self.names)


class ForeignFormat(Enum):
    """A format of another program. The value is the name that its program gives it."""

    HUGGING_FACE = "Hugging Face"
    TORCH_DIST = "torch_dist"
    TORCH = "torch"
    ZARR = "zarr"

    @property
    def problem(self) -> str:
        """One sentence, without its subject, on such a folder where a checkpoint is read: what it is, what to do."""
        if self is ForeignFormat.HUGGING_FACE:
            return (
                "is a Hugging Face folder, not a checkpoint of this trainer; import it first: llmctl checkpoint import "
                "HF_DIR --output CKPT"
            )
        if self is ForeignFormat.TORCH_DIST:
            return (
                "holds a checkpoint of Megatron-LM in the format torch_dist, or of another program that uses "
                "torch.distributed.checkpoint (DCP), not one of this trainer; import the weights of Megatron-LM first: "
                "llmctl checkpoint import MEGATRON_DIR --output CKPT"
            )
        return (
            f"holds a checkpoint of Megatron-LM in the format {self.value}, which this trainer does not read; let "
            "Megatron-LM write it as torch_dist (--ckpt-convert-format torch_dist), then: llmctl checkpoint import "
            "MEGATRON_DIR --output CKPT"
        )

    @property
    def problem_of_target(self) -> str:
        """One sentence, without its subject, on such a folder where checkpoints are to be written."""
        what = (
            "a Hugging Face folder" if self is ForeignFormat.HUGGING_FACE else "a folder of Megatron-LM's checkpoints"
        )
        return f"is {what}; this trainer's checkpoints need a folder of their own, name another"


def format_of(folder: Listing) -> ForeignFormat | None:
    """Format of a folder of checkpoints, of a single checkpoint, or of a published model.

    None if the folder is of none of these formats, or has a checkpoint of this trainer.
    """
    if any(_is_native(names) for names in (folder.names, *folder.iterations.values())):
        return None
    if _is_hub_config(folder.config):
        return ForeignFormat.HUGGING_FACE
    formats = (_megatron(names) for names in (folder.names, *folder.iterations.values()))
    return next((found for found in formats if found is not None), None)


def _is_native(names: Collection[str]) -> bool:
    return NATIVE_METADATA in names and not (_COMMON in names or _DCP_METADATA in names or _has(names, _TENSORS))


def _is_hub_config(text: str) -> bool:
    try:
        return "model_type" in json.loads(text)
    except (ValueError, TypeError):
        return False


def _megatron(names: Collection[str]) -> ForeignFormat | None:
    """Format of one iteration. Both distributed formats have common.pt; zarr has a folder per tensor beside it."""
    if _DCP_METADATA in names or _has(names, _TENSORS):
        return ForeignFormat.TORCH_DIST
    if _COMMON in names:
        return ForeignFormat.ZARR
    return ForeignFormat.TORCH if _has(names, _RANKS) else None


def _has(names: Collection[str], pattern: str) -> bool:
    return any(fnmatch(name, pattern) for name in names)
