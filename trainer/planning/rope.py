"""RopeScaling: meaning of model.rope_scaling, in the words of Hugging Face's config.json. Torch-free.

linear: Chen et al. 2023 (arXiv:2306.15595). llama3: Llama 3.1's model card and code. yarn: Peng et al. 2023
(arXiv:2309.00071), section 3; mscale and mscale_all_dim: DeepSeek-V2 (arXiv:2405.04434), section 3.1.4. dynamic changes
nothing up to max_position_embeddings, and longer sequences are refused. longrope: Ding et al. 2024 (arXiv:2402.13753),
section 3.3. llama_4_scaling_beta: the scale of queries of Llama 4 and Ministral 3, as transformers computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.config.train_config import TrainConfig

_KEY = "model.rope_scaling"
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": (
        *("attention_factor", "beta_fast", "beta_slow", "llama_4_scaling_beta", "mscale", "mscale_all_dim"),
        "truncate",
    ),
    "longrope": ("attention_factor",),
}
_MAY_BE_ZERO = ("llama_4_scaling_beta", "mscale", "mscale_all_dim")
_LISTS = ("short_factor", "long_factor")


@dataclass(frozen=True)
class RopeScaling:
    """Change of the rotation angles for longer contexts. Numbers that the type does not use have no effect.

    Attributes:
        rope_type: formula of the change.
        factor: ratio of the new context length to the old.
        original_max_position_embeddings: the old context length, in tokens.
        low_freq_factor: llama3 divides frequencies with fewer turns than this over the old length.
        high_freq_factor: llama3 keeps frequencies with more turns than this over the old length.
        beta_fast: yarn keeps frequencies with more turns than this over the old length.
        beta_slow: yarn divides frequencies with fewer turns than this over the old length.
        truncate: yarn rounds the bounds between the two to whole channels.
        attention_factor: factor of cosines and sines in yarn and longrope; None computes it.
        mscale: yarn's weight of log(factor) in the factor of cosines and sines.
        mscale_all_dim: the same in its divisor. Multi-head latent attention multiplies scores by it instead.
        short_factor: longrope divides the frequency of each pair by its entry, in rows up to the old length.
        long_factor: the same in longer rows.
        llama_4_scaling_beta: with yarn, queries at p are multiplied by 1 + beta log(1 + floor(p / old length)).
    """

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    llama_4_scaling_beta: float = 0.0

    @classmethod
    def of(cls, model: ModelConfig) -> RopeScaling:
        """Read the key of ``model``.

        Raises:
            ConfigError: an unknown type, or a number that is missing, unknown or out of range.
        """
        given = {name: value for name, value in (model.rope_scaling or {}).items() if value is not None}
        rope_type = _rope_type(given)
        required, optional = _REQUIRED[rope_type], _OPTIONAL.get(rope_type, ())
        numbers = {name: value for name, value in given.items() if name not in ("rope_type", "type")}
        for name in numbers:
            if name not in (*required, *optional):
                has = f"has {', '.join((*required, *optional))}" if required else "takes no numbers"
                raise ConfigError(_KEY, f"{name} is unknown; rope_type {rope_type} {has}; remove it")
        missing = [name for name in required if name not in numbers]
        if missing:
            raise ConfigError(_KEY, f"rope_type {rope_type} needs {', '.join(missing)}; take it from config.json")
        for name, value in numbers.items():
            _check_value(name, value)
        numbers |= {name: tuple(numbers[name]) for name in _LISTS if name in numbers}
        found = cls(rope_type=rope_type, **numbers)
        found._check_order()
        return found

    def _check_order(self) -> None:
        lower = {"llama3": "low_freq_factor", "yarn": "beta_slow"}.get(self.rope_type)
        upper = {"llama3": "high_freq_factor", "yarn": "beta_fast"}.get(self.rope_type)
        if not lower or not upper:
            return
        low, high = getattr(self, lower), getattr(self, upper)
        # Kimi K2 has equal numbers in yarn, whose ramp is then one pair wide; llama3 would divide by 0.
        if low > high or (low == high and self.rope_type == "llama3"):
            raise ConfigError(_KEY, f"{lower} {low:g} is not below {upper} {high:g}; exchange them")

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope" and self.factor > 1.0:
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_max_position_embeddings))
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def score_factor(self) -> float:
        """Factor of the attention scores in multi-head latent attention (DeepSeek-V2, section 3.1.4)."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.rope_type == "yarn" else 1.0

    def _magnitude(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


UNSCALED = RopeScaling()
"""Angles as they are."""


def _rope_type(given: Mapping[str, Any]) -> Any:
    """``rope_type``, or ``type`` as older files write it."""
    found = given.get("rope_type", given.get("type", None if given else "default"))
    if found is None:
        raise ConfigError(_KEY, f"has no rope_type; use one of {', '.join(_REQUIRED)}")
    if found != given.get("type", found):
        raise ConfigError(_KEY, f"rope_type {found} and type {given['type']} contradict each other; remove type")
    if found not in _REQUIRED:
        raise ConfigError(_KEY, f"rope_type {found} is not supported; use one of {', '.join(_REQUIRED)}")
    return found


def _check_value(name: str, value: Any) -> None:
    if name in _LISTS:
        if not isinstance(value, (list, tuple)) or not value:
            raise ConfigError(
                _KEY, f"{name} is {value!r}; use a list of numbers, one for each pair of rotated channels"
            )
        for place, number in enumerate(value):
            _check_number(f"{name}[{place}]", number)
    elif name == "truncate":
        if not isinstance(value, bool):
            raise ConfigError(_KEY, f"truncate is {value!r}; use true or false")
    else:
        _check_number(name, value)


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        raise ConfigError(_KEY, f"{name} is {value!r}; use a number above 0")
    if name == "factor" and value < 1:
        raise ConfigError(_KEY, f"factor is {value!r}; use at least 1, which changes nothing")


def check_rope(config: TrainConfig) -> None:
    """Refuse keys of rotary positions that contradict each other.

    Raises:
        ConfigError: names the key.
    """
    model = config.model
    scaling = RopeScaling.of(model)
    for name in ("rope_scaling", "rotary_base_local", "rotary_interleaved"):
        if getattr(model, name) and model.position_embedding_type != "rope":
            raise ConfigError(f"model.{name}", "needs position_embedding_type rope; set that, or leave this key out")
    if model.rotary_base_local is not None and model.window_size is None:
        raise ConfigError(
            "model.rotary_base_local",
            "is only for layers with a sliding window, which this model lacks; set model.window_size, or rotary_base",
        )
    rotated = model.rotated_channels
    for name in _LISTS:
        count = len(getattr(scaling, name))
        if scaling.rope_type == "longrope" and count != rotated // 2:
            raise ConfigError(
                _KEY, f"{name} has {count} numbers, but a head has {rotated // 2} pairs of rotated channels"
            )
    if scaling.llama_4_scaling_beta and model.multi_latent_attention:
        raise ConfigError(
            _KEY, "llama_4_scaling_beta is not supported with multi_latent_attention; leave one of them out"
        )
    # Channels are rotated in pairs.
    if model.position_embedding_type == "rope" and (rotated % 2 or not rotated):
        if model.multi_latent_attention:
            raise ConfigError("model.qk_pos_emb_head_dim", f"{rotated} channels are not pairs; use {rotated + 1}")
        raise ConfigError(
            "model.rotary_percent",
            f"rotates {rotated} of {model.head_dim} channels per head; choose rotary_percent and kv_channels so that "
            "this is an even number above 0",
        )
