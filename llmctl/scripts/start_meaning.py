"""Meaning of --load and --save together, where Megatron-LM's meaning depends on what the folders hold."""

from __future__ import annotations

import re
from posixpath import normpath

from llmctl.scripts.flag_meaning import FlagMeaning, line_of
from trainer.config.sections.checkpoint import PARTIAL_STARTS, folder_apart

_SAVE, _LOAD = "checkpoint.save", "checkpoint.load"


def put_start(flags: FlagMeaning) -> None:
    """Tell of a folder that is both loaded and saved; with a part of its state only, give save a folder of its own.

    Megatron-LM overwrites such a start point, and starts from it again at every start.
    """
    load, save = flags.values.get(_LOAD), flags.values.get(_SAVE)
    if not isinstance(load, str) or not isinstance(save, str) or normpath(load) != normpath(save):
        return
    key = next((name for name in PARTIAL_STARTS if flags.values.get(f"checkpoint.{name}") in (True, "true")), None)
    if key is None:
        if flags.values.get("checkpoint.exit_on_missing_checkpoint") not in (True, "true"):
            flags.origins[_LOAD] += ": the folder of --save; its latest checkpoint, or new weights while it holds none"
        return
    apart = folder_apart(save, key)
    cause = _in_brackets(flags.origins.get(f"checkpoint.{key}", f"--{key.replace('_', '-')}"))
    own = flags.origins.get(_SAVE, "--save")
    flags.values[_SAVE] = apart
    flags.origins[_SAVE] = f"{own}: beside the folder of --load, from which {cause} takes a part"
    reason = (
        f"checkpoints go to {apart}, because {cause} takes only a part of what --load names in the same folder, which "
        "they would overwrite, and a later start must go on from them"
    )
    flags.remarks.append((line_of(own), f"--save {save}", reason))


def _in_brackets(origin: str) -> str:
    """``--finetune (line 3)`` from ``--finetune, line 3``."""
    return re.sub(r", (line \d+)$", r" (\1)", origin)
