"""Choices that the flags of a script leave to the user: bf16 instead of fp8, and the base width of bigscience's mup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.flag_group import FlagGroup
from llmctl.scripts.flag_meaning import FlagMeaning
from trainer.config.joint.mup import BASE_FLAG, FORK_SWITCH

GIVEN, INSTEAD = "fp8", "bf16"
"""``--arg fp8=bf16`` trains a script in bf16 that asks for fp8."""
BASE_WIDTH = BASE_FLAG
"""``--arg mup-base-hidden-size=N`` gives the width of a base model that a script does not name."""
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


def base_width_asked(groups: Sequence[FlagGroup], given: Mapping[str, str]) -> list[tuple[int, str]]:
    """Line and sentence of the question for the base width of --mup, whose program reads it from a file of shapes."""
    switch = _fork_switch(groups)
    if switch is None or BASE_WIDTH in given:
        return []
    sentence = (
        f"--{switch.name}: the script does not name the hidden size of its base model, for which --lr was found; give "
        f"it with --arg {BASE_WIDTH}=VALUE"
    )
    return [(switch.line, sentence)]


def with_base_width(groups: Sequence[FlagGroup], given: Mapping[str, str]) -> list[FlagGroup]:
    """The flags, with the base width that the user gives for --mup."""
    switch = _fork_switch(groups)
    if switch is None:
        return list(groups)
    return [*groups, replace(switch, name=BASE_FLAG, words=(f"--{BASE_FLAG}", given[BASE_WIDTH]))]


def _fork_switch(groups: Sequence[FlagGroup]) -> FlagGroup | None:
    """The --mup of flags without a base width."""
    named = {group.name.replace("_", "-"): group for group in groups}
    return None if BASE_FLAG in named else named.get(FORK_SWITCH)


def tell_rules_of_mup(flags: FlagMeaning, groups: Sequence[FlagGroup]) -> None:
    """Say where the rules of --mup are those of Megatron-LM."""
    for group in groups:
        if group.name.replace("_", "-") == FORK_SWITCH:
            sentence = (
                "follows Megatron-LM's --use-mup: Adam's epsilon falls with the width, and lr x weight_decay with lr; "
                "the package mup keeps both"
            )
            flags.remarks.append((group.line, f"--{group.name}", sentence))
