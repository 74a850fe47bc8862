"""Flags that Megatron-LM reads only beside another flag, which the script does not give."""

from __future__ import annotations

import re

from llmctl.scripts.flag_meaning import FlagMeaning

_LOSS_SCALE, _ROPE_SCALING = "training.loss_scale", "model.rope_scaling"


def drop_idle(flags: FlagMeaning) -> None:
    """Leave out what has no effect in the script either, with a note."""
    if _LOSS_SCALE in flags.values and flags.values.get("training.fp16") not in (True, "true"):
        _drop(_LOSS_SCALE, "only the gradients of --fp16 are scaled", flags)
    scaling = flags.values.get(_ROPE_SCALING)
    if isinstance(scaling, dict) and scaling.keys() == {"factor"}:
        _drop(_ROPE_SCALING, "has an effect beside --use-rope-scaling alone", flags)


def _drop(key: str, reason: str, flags: FlagMeaning) -> None:
    del flags.values[key]
    origin = flags.origins.pop(key, key)
    line = re.search(r", line (\d+)", origin)
    flags.without_effect.append((int(line[1]) if line else 0, origin.partition(",")[0], reason))
