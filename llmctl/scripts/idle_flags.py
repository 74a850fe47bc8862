"""Flags that are left out of a config: Megatron-LM too ignores them in this script, or other kernels do the same."""

from __future__ import annotations

from llmctl.scripts.flag_meaning import FlagMeaning, line_of
from trainer.config.sections.model import ModelConfig

_LOSS_SCALE, _ROPE_SCALING = "training.loss_scale", "model.rope_scaling"
_BACKEND, _DROPOUT = "model.attention_backend", "model.attention_dropout"


def drop_idle(architecture: str, flags: FlagMeaning) -> None:
    """Leave them out, with a note.

    Args:
        architecture: that the script's program trains.
        flags: of the script.
    """
    if _LOSS_SCALE in flags.values and flags.values.get("training.fp16") not in (True, "true"):
        _drop(_LOSS_SCALE, "only the gradients of --fp16 are scaled", flags)
    scaling = flags.values.get(_ROPE_SCALING)
    if isinstance(scaling, dict) and scaling.keys() == {"factor"}:
        _drop(_ROPE_SCALING, "has an effect beside --use-rope-scaling alone", flags)
    reason = _reason_against_kernels(architecture, flags)
    if reason:
        _drop(_BACKEND, reason, flags)


def _reason_against_kernels(architecture: str, flags: FlagMeaning) -> str:
    """The reason why the named kernels do not compute this attention here; empty if they do."""
    backend = flags.values.get(_BACKEND)
    dropout = flags.values.get(_DROPOUT, ModelConfig.model_fields[_DROPOUT.partition(".")[2]].default)
    if architecture == "t5" and backend is not None:
        return "T5's attention has one implementation"
    if backend == "flash" and architecture == "bert":
        return "flash-attention takes no padding here, so other kernels are taken"
    if backend == "flash" and float(dropout) > 0:
        return "flash-attention takes no dropout here, so other fused kernels are taken"
    return ""


def _drop(key: str, reason: str, flags: FlagMeaning) -> None:
    value, origin = flags.values.pop(key), flags.origins.pop(key, key)
    shown = f"{origin.partition(',')[0]} {'' if isinstance(value, dict) else value}".strip()
    flags.without_effect.append((line_of(origin), shown, reason))
