"""RopeScaling: meaning of model.rope_scaling, in the words of Hugging Face's config.json. Torch-free.

linear: Chen et al. 2023 (arXiv:2306.15595). llama3: Llama 3.1's model card and code. yarn: Peng et al. 2023
(arXiv:2309.00071), section 3; mscale and mscale_all_dim: DeepSeek-V2 (arXiv:2405.04434), section 3.1.4. dynamic changes
nothing up to max_position_embeddings, and longer sequences are refused.
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
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")


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
        attention_factor: yarn's factor of cosines and sines; None computes it.
        mscale: yarn's weight of log(factor) in the factor of cosines and sines.
        mscale_all_dim: the same in its divisor. Multi-head latent attention multiplies scores by it instead.
    """

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
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
            _check_number(name, value)
        found = cls(rope_type=rope_type, **numbers)
        found._check_order()
        return found

    def _check_order(self) -> None:
        lower = {"llama3": "low_freq_factor", "yarn": "beta_slow"}.get(self.rope_type)
        upper = {"llama3": "high_freq_factor", "yarn": "beta_fast"}.get(self.rope_type)
        if lower and upper and not getattr(self, lower) < getattr(self, upper):
            raise ConfigError(
                _KEY, f"{lower} {getattr(self, lower):g} is not below {upper} {getattr(self, upper):g}; exchange them"
            )

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
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


def _check_number(name: str, value: Any) -> None:
    if name == "truncate":
        if not isinstance(value, bool):
            raise ConfigError(_KEY, f"truncate is {value!r}; use true or false")
        return
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
    RopeScaling.of(model)
    for name in ("rope_scaling", "rotary_base_local", "rotary_interleaved"):
        if getattr(model, name) and model.position_embedding_type != "rope":
            raise ConfigError(f"model.{name}", "needs position_embedding_type rope; set that, or leave this key out")
    if model.rotary_base_local is not None and model.window_size is None:
        raise ConfigError(
            "model.rotary_base_local",
            "is only for layers with a sliding window, which this model lacks; set model.window_size, or rotary_base",
        )
    rotated = model.rotated_channels
    if model.position_embedding_type == "rope" and (rotated % 2 or not rotated):
        if model.multi_latent_attention:
            raise ConfigError("model.qk_pos_emb_head_dim", f"{rotated} channels are not pairs; use {rotated + 1}")
        raise ConfigError(
            "model.rotary_percent",
            f"rotates {rotated} of {model.head_dim} channels per head; choose rotary_percent and kv_channels so that "
            "this is an even number above 0",
        )
