"""Flags of maximal update parametrization (Yang et al. 2022, arXiv:2203.03466). Torch-free.

Those of Megatron-LM: NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/transformer_config.py. Those of
bigscience's Megatron-DeepSpeed are factors of the package mup (microsoft/mup), without the width of its base model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_BASE, _EMBEDDING = "model.mup_base_hidden_size", "model.embedding_scale"
_LOGITS, _SCORES = "model.logits_scaling", "model.softmax_scale"
BASE_FLAG, FORK_SWITCH = "mup-base-hidden-size", "mup"
_SWITCH = "use-mup"
_OF_MEGATRON: Mapping[str, tuple[str, ...]] = {
    _SWITCH: (_BASE,),
    BASE_FLAG: (_BASE,),
    "mup-embedding-mult": (_EMBEDDING,),
    "mup-output-mult": (_LOGITS,),
    "mup-base-head-dim": (_SCORES,),
    "mup-attn-scale-power": (_SCORES,),
    "mup-width-mult": (_BASE,),
}
_OF_FORK: Mapping[str, tuple[str, ...]] = {
    FORK_SWITCH: (_BASE,),
    "mup-input-mult": (_EMBEDDING,),
    "mup-attn-mult": (_SCORES,),
}
MUP_FLAGS: Mapping[str, tuple[str, ...]] = {**_OF_MEGATRON, **_OF_FORK}
"""Flag -> keys that it may set."""
_SCALED = "--softmax-scale is used instead"
_MOST_DIGITS = 12
MUP_SWITCHES = (_SWITCH, FORK_SWITCH)


def mup_values(
    given: Mapping[str, Sequence[str]], values: Mapping[str, Any], found: dict[str, Any], idle: dict[str, str]
) -> None:
    """Put the values of keys by these flags into ``found``, and the flags without effect into ``idle``.

    Args:
        given: the flags with their values.
        values: keys that the other flags set.
        found: key -> value.
        idle: flag -> reason.

    Raises:
        ValueError: a sentence that begins with the flag.
    """
    asked = [flag for flag in given if flag in MUP_FLAGS]
    switch = _switch(asked)
    if switch is None:
        idle |= dict.fromkeys(asked, f"Megatron-LM reads the flag only beside --{_SWITCH}")
        return
    if "mup-width-mult" in asked:
        idle["mup-width-mult"] = f"Megatron-LM computes it from --hidden-size and --{BASE_FLAG}"
    hidden = _whole("model.hidden_size", values, switch)
    found[_BASE] = base = _base(given, hidden, switch)
    if (embedding := _number("mup-embedding-mult", given) * _number("mup-input-mult", given)) != 1:
        _put(_EMBEDDING, embedding, values, found)
    if (output := _number("mup-output-mult", given)) != 1:
        # In Megatron-LM the whole factor of the logits, in the package mup a factor beside that of the widths.
        _put(_LOGITS, (1 if switch == _SWITCH else hidden / base) / output, values, found)
    scores, power = _number("mup-attn-mult", given), _number("mup-attn-scale-power", given)
    scores *= math.sqrt(_number("mup-base-head-dim", given))
    if (scores, power) != (1, 1) and _SCORES not in values:
        found[_SCORES] = scores * _head_dim(values, switch) ** -power
    for flag in asked:
        if flag not in idle and not found.keys() & set(MUP_FLAGS[flag]):
            is_scaled = _SCORES in values and MUP_FLAGS[flag] == (_SCORES,)
            idle[flag] = _SCALED if is_scaled else "a factor of 1 changes nothing"


def _switch(asked: Sequence[str]) -> str | None:
    """The flag that asks for the parametrization of one of the two programs."""
    switches = [flag for flag in asked if flag in MUP_SWITCHES]
    if not switches:
        return None
    if len(switches) > 1:
        raise ValueError(f"--{FORK_SWITCH}: is another program's --{_SWITCH}; leave one of them out")
    (switch,) = switches
    own, others = (_OF_MEGATRON, _OF_FORK) if switch == _SWITCH else (_OF_FORK, _OF_MEGATRON)
    for flag in asked:
        if flag in others and flag not in own and flag not in (BASE_FLAG, "mup-output-mult"):
            raise ValueError(f"--{flag}: does not belong to --{switch}; leave one of them out")
    return switch


def _base(given: Mapping[str, Sequence[str]], hidden: int, switch: str) -> int:
    if BASE_FLAG not in given:
        if switch == _SWITCH:
            return hidden
        raise ValueError(f"--{switch}: the width of the base model is not in the flags; give --{BASE_FLAG}")
    text = given[BASE_FLAG][0]
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) == 0:
        raise ValueError(f"--{BASE_FLAG}: {text[:30]!r} is not valid; use the hidden size of the base model")
    return int(text)


def _put(key: str, factor: float, values: Mapping[str, Any], found: dict[str, Any]) -> None:
    if key in values:
        raise ValueError(
            f"--{key.rpartition('.')[2].replace('_', '-')}: is also set by a flag of mup; give one of them"
        )
    found[key] = factor


def _head_dim(values: Mapping[str, Any], switch: str) -> int:
    if "model.kv_channels" in values:
        return _whole("model.kv_channels", values, switch)
    # More heads than channels are refused with the config.
    return max(_whole("model.hidden_size", values, switch) // _whole("model.num_attention_heads", values, switch), 1)


def _whole(key: str, values: Mapping[str, Any], switch: str) -> int:
    text, flag = str(values.get(key, "")), key.rpartition(".")[2].replace("_", "-")
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) == 0:
        raise ValueError(f"--{switch}: needs --{flag} beside it, a whole number; give both")
    return int(text)


def _number(flag: str, given: Mapping[str, Sequence[str]]) -> float:
    try:
        number = float(given[flag][0]) if flag in given else 1.0
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"--{flag}: {given[flag][0]!r} is not a number above 0")
    return number
