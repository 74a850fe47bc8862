"""Flags of Megatron-LM with a meaning that follows from several flags together. Torch-free.

Read from NVIDIA/Megatron-LM@d98e8a64: megatron/training/argument_utils.py (core_transformer_config_from_args), and
below megatron/core, models/common/embeddings/yarn_rotary_pos_embedding.py, transformer/multi_latent_attention.py,
transformer/mlp.py and transformer/utils.py (is_layer_window_attention).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.joint.mup import MUP_FLAGS, MUP_SWITCHES, mup_values
from trainer.config.joint.weighted_splits import WEIGHTED_FLAGS, weighted_values

_SCALING, _POSITIONS = "model.rope_scaling", "model.position_embedding_type"
_WINDOW, _WINDOW_LAYERS = "model.window_size", "model.window_layers"
_ORIGINAL = "yarn-original-max-position-embeddings"
_YARN_NUMBERS = {
    "rotary-scaling-factor": 1.0,
    _ORIGINAL: 4096.0,
    "yarn-beta-fast": 32.0,
    "yarn-beta-slow": 1.0,
    "mscale": 1.0,
    "mscale-all-dim": 0.0,
}
"""Flag of a number of yarn -> Megatron-LM's default."""
_OF_LATENT_ATTENTION = ("rotary-scaling-factor", "mscale", "mscale-all-dim")
"""Those that multi-head latent attention reads too; it has the defaults of the others."""
_ROUND, _NO_ROUND = "yarn-correction-range-round-to-int", "no-yarn-correction-range-round-to-int"
_OF_YARN = (*_YARN_NUMBERS, _ROUND, _NO_ROUND)
_GATED, _OFFSET = "quick-geglu", "glu-linear-offset"
_QUICK_ALPHA = 1.702
_WIDTH = "model.ffn_hidden_size"
_SKIP = "window-attn-skip-freq"
_TRUE = (True, "true", "True", "1")

JOINT_FLAGS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("rope-type", *_OF_YARN), (_SCALING,)),
    _GATED: ("model.activation_alpha", "model.activation_func", "model.gated_linear_unit", _WIDTH),
    _OFFSET: ("model.activation_alpha",),
    _SKIP: (_WINDOW_LAYERS,),
    **MUP_FLAGS,
    **WEIGHTED_FLAGS,
}
"""Flag -> keys that it sets beside the others."""
_SWITCHES = (_ROUND, _NO_ROUND, _GATED, *MUP_SWITCHES)


def joint_values(
    given: Mapping[str, Sequence[str]], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of keys by the flags, and flag -> reason for each flag that has no effect here.

    Args:
        given: flags of ``JOINT_FLAGS`` with their values.
        values: keys that the other flags set.

    Raises:
        ValueError: a sentence that begins with the flag.
    """
    for flag, words in given.items():
        if flag not in WEIGHTED_FLAGS and len(words) != (flag not in _SWITCHES):
            raise ValueError(f"--{flag}: takes {'no' if flag in _SWITCHES else 'one'} value, not {len(words)}")
    found: dict[str, Any] = dict(weighted_values(given))
    idle: dict[str, str] = {}
    _read_yarn(given, values, found, idle)
    _read_activation(given, values, found, idle)
    _read_window(given, values, found, idle)
    mup_values(given, values, found, idle)
    return found, idle


def _read_yarn(
    given: Mapping[str, Sequence[str]], values: Mapping[str, Any], found: dict[str, Any], idle: dict[str, str]
) -> None:
    is_latent = values.get("model.multi_latent_attention") in _TRUE
    is_yarn = values.get(_POSITIONS) == "yarn" and not is_latent
    rope_type = given.get("rope-type", [""])[0]
    _check_rope_type(rope_type, is_latent, given)
    if is_latent:
        read: Sequence[str] = () if rope_type == "rope" else _OF_LATENT_ATTENTION
        # A factor of 1 changes no angle.
        read = read if _number("rotary-scaling-factor", given) != 1 else ()
    else:
        read = _OF_YARN if is_yarn else ()
    for flag in given:
        if flag in _OF_YARN and flag not in read:
            idle[flag] = "Megatron-LM reads the flag only beside yarn, whose angles this script does not have"
    if "rope-type" in given:
        idle["rope-type"] = "the numbers of yarn say whether angles change"
    if is_yarn:
        found[_POSITIONS] = "rope"
    if read:
        _check_alone(values, is_latent)
        numbers = {flag: _number(flag, given) if flag in read else number for flag, number in _YARN_NUMBERS.items()}
        found[_SCALING] = _yarn(numbers, truncate=is_latent or _NO_ROUND not in given)


def _check_rope_type(rope_type: str, is_latent: bool, given: Mapping[str, Sequence[str]]) -> None:
    if rope_type not in ("", "rope", "yarn"):
        raise ValueError(f"--rope-type: {rope_type!r} is not valid; use rope or yarn")
    if rope_type == "yarn" and not is_latent:
        raise ValueError(
            "--rope-type: yarn is for --multi-latent-attention, as in Megatron-LM; use --position-embedding-type yarn"
        )
    if rope_type == "rope" and is_latent and _scores_change(given):
        raise ValueError(
            "--mscale-all-dim: Megatron-LM scales scores by it even with --rope-type rope; use --softmax-scale"
        )


def _scores_change(given: Mapping[str, Sequence[str]]) -> bool:
    return _number("mscale-all-dim", given) != 0 and _number("rotary-scaling-factor", given) > 1


def _check_alone(values: Mapping[str, Any], is_latent: bool) -> None:
    if "rope_type" in (values.get(_SCALING) or {}):
        raise ValueError("--rope-scaling: has the numbers of yarn too; give them once")
    if not is_latent and not _rotates_all(values.get("model.rotary_percent", 1)):
        raise ValueError("--rotary-percent: yarn of Megatron-LM rotates all channels; leave the flag out")


def _rotates_all(percent: object) -> bool:
    try:
        return float(str(percent)) == 1
    except ValueError:
        return True  # The key itself is refused.


def _yarn(numbers: Mapping[str, float], truncate: bool) -> dict[str, Any]:
    factor, mscale, all_dim = numbers["rotary-scaling-factor"], numbers["mscale"], numbers["mscale-all-dim"]
    original = numbers[_ORIGINAL]
    if not original.is_integer():
        raise ValueError(f"--{_ORIGINAL}: {original} is not a whole number")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original),
        "beta_fast": numbers["yarn-beta-fast"],
        "beta_slow": numbers["yarn-beta-slow"],
    }
    if not truncate:
        scaling["truncate"] = False
    if all_dim:
        scaling["mscale_all_dim"] = all_dim
    if mscale and all_dim:
        scaling["mscale"] = mscale
    elif (mscale, all_dim) != (1, 0):
        # Without both numbers trainer.planning.rope takes those of yarn's paper.
        scaling["attention_factor"] = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    return scaling


def _magnitude(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_activation(
    given: Mapping[str, Sequence[str]], values: Mapping[str, Any], found: dict[str, Any], idle: dict[str, str]
) -> None:
    offset = _number(_OFFSET, given, 0.0)
    if _GATED not in given:
        if offset:
            raise ValueError(
                f"--{_OFFSET}: is for --{_GATED}; with --swiglu use --activation-alpha 1, which adds 1 to the ups"
            )
        idle |= {_OFFSET: "0 changes nothing"} if _OFFSET in given else {}
        return
    if values.get("model.swiglu") in _TRUE:
        raise ValueError(f"--{_GATED}: cannot be combined with --swiglu, as in Megatron-LM; leave one of them out")
    if offset != 1:
        raise ValueError(
            f"--{_GATED}: quick GeLU without --{_OFFSET} 1, with which gpt-oss has it, is not supported; use --swiglu"
        )
    found["model.activation_func"], found["model.gated_linear_unit"] = "silu", True
    found["model.activation_alpha"] = _QUICK_ALPHA
    hidden = str(values.get("model.hidden_size", ""))
    if _WIDTH not in values and hidden.isdecimal():
        # Megatron-LM narrows the layers beside --swiglu alone.
        found[_WIDTH] = 4 * int(hidden)


def _read_window(
    given: Mapping[str, Sequence[str]], values: Mapping[str, Any], found: dict[str, Any], idle: dict[str, str]
) -> None:
    text = str(values.get(_WINDOW, ""))
    if "," in text:
        found[_WINDOW] = _window(text)
    if _SKIP not in given:
        return
    if not text:
        idle[_SKIP] = "no layer has a window without --window-size"
        return
    pattern = given[_SKIP][0]
    if "[" in pattern:
        found[_WINDOW_LAYERS] = pattern
        return
    layers, step = str(values.get("model.num_layers", "")), _number(_SKIP, given)
    if not layers.isdecimal() or step < 1 or not step.is_integer():
        raise ValueError(f"--{_SKIP}: takes a whole number from 1 beside --num-layers, or a list with 0 and 1")
    found[_WINDOW_LAYERS] = [(layer + 1) % step != 0 for layer in range(int(layers))]


def _window(text: str) -> int:
    """Megatron-LM's ``LEFT,RIGHT``, tokens beside the query's own; those on the right are never seen."""
    left = text.strip("()").partition(",")[0].strip()
    if not left.isdecimal():
        raise ValueError(f"--window-size: {text!r} is not valid; use the number of tokens that a query sees")
    return int(left) + 1


def _number(flag: str, given: Mapping[str, Sequence[str]], default: float | None = None) -> float:
    if flag not in given:
        return _YARN_NUMBERS[flag] if default is None else default
    try:
        number = float(given[flag][0])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"--{flag}: {given[flag][0]!r} is not a number")
    return number
