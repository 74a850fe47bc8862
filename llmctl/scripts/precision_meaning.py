"""Meaning of the flags of a script that ask for fp8, which this trainer does not compute: bf16, if the user says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.flag_group import FlagGroup
from llmctl.scripts.flag_meaning import FlagMeaning

GIVEN, INSTEAD = "fp8", "bf16"
"""``--arg fp8=bf16`` trains a script in bf16 that asks for fp8."""
_REQUESTS = ("fp8-format", "fp8-hybrid", "fp8-e4m3")
_OF_LAYERS = ("first-last-layers-bf16", "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16")
"""Flags of layers that fp8 leaves in bf16; others about fp8 have it in their names."""
_BF16, _FP16 = "training.bf16", "training.fp16"


def divide_fp8(groups: Sequence[FlagGroup], given: Mapping[str, str]) -> tuple[list[FlagGroup], list[FlagGroup]]:
    """The flags without those that ask for fp8, and these.

    Raises:
        ScriptError: fp8 is asked for, and the user has not said what to train in instead.
    """
    asking = [group for group in groups if group.name.replace("_", "-") in _REQUESTS]
    if asking and given.get(GIVEN) != INSTEAD:
        choice = f"--arg {GIVEN}={INSTEAD} trains this script in bf16"
        problem = f"--{asking[0].name}: fp8 training is not supported; {choice}"
        raise ScriptError.asking(asking[0].line, problem, GIVEN, [INSTEAD])
    about = [group for group in groups if asking and (group in asking or _is_about_fp8(group))]
    return [group for group in groups if group not in about], [*asking, *(one for one in about if one not in asking)]


def _is_about_fp8(group: FlagGroup) -> bool:
    name = group.name.replace("_", "-")
    return "fp8" in name or name in _OF_LAYERS


def put_bf16(asking: Sequence[FlagGroup], flags: FlagMeaning) -> None:
    """Train in bf16 what asks for fp8, and say so."""
    if not asking:
        return
    choice = f"--arg {GIVEN}={INSTEAD}"
    flags.values.pop(_FP16, None)
    flags.origins.pop(_FP16, None)
    if flags.values.get(_BF16) not in (True, "true"):
        flags.values[_BF16], flags.origins[_BF16] = True, choice
    for group in asking:
        flags.without_effect.append((group.line, " ".join(group.words), f"trained in bf16, as {choice} says"))
    flags.remarks.append((asking[0].line, f"--{asking[0].name}", f"trains in bf16 instead of fp8, as {choice} says"))
