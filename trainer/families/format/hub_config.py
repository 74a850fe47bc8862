"""config.json of a Hugging Face folder: each key is read, has no effect, or is refused by name. Torch-free.

A key that the file lacks means what the config class of transformers means by its absence: the family's row says so in
``absent``, also for keys that are null where the class knows no null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainer.families.format.errors import FamilyError
from trainer.families.format.without_effect import OFF, WITHOUT_EFFECT

_MOST = 2**31 - 1
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "num_nextn_predict_layers")
_MOST_OF = {
    **dict.fromkeys(_LAYERS, 10_000),
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts_per_tok"), 100_000),
}
"""Bounds of numbers that decide how many tensors a model has."""
_MAY_BE_ZERO = frozenset(
    ["first_k_dense_replace", "max_window_layers", "n_shared_experts", "num_nextn_predict_layers", "type_vocab_size"]
)
_WORDS = {bool: "true or false", int: "a whole number above 0", float: "a number", str: "text", list: "a list"}
_UNGIVEN = object()


class HubConfig:
    """Reader of one config.json. A key that nobody has read is refused at the end."""

    def __init__(
        self,
        keys: Mapping[str, Any],
        where: str,
        absent: Mapping[str, Any] = MappingProxyType({}),
        without_effect: Mapping[str, str] = MappingProxyType({}),
        aliases: Mapping[str, str] = MappingProxyType({}),
    ):
        """Wrap the keys of the file named ``where``.

        Args:
            keys: content of the file.
            where: name of the file, for messages.
            absent: key -> value that its absence means.
            without_effect: keys without effect in this family, beside the general ones.
            aliases: other name of a key -> the key.

        Raises:
            FamilyError: a key and its other name have different values.
        """
        self.where = where
        self._keys = dict(keys)
        self._absent = absent
        self._without_effect = without_effect
        self._read: set[str] = set()
        self._problems: list[str] = []
        for alias, key in aliases.items():
            value = self._keys.pop(alias, None)
            if value is not None and self._keys.setdefault(key, value) != value:
                raise FamilyError(f"{where}: {key} is {self._keys[key]!r}, but {alias}, its other name, is {value!r}")

    def take(self, key: str, *, null: Any = _UNGIVEN) -> Any:
        """The value of ``key``, of the type of the value that its absence means.

        Args:
            key: the key.
            null: what null means; left out: the same as absence for a key that may be null, "off" for a flag.

        Raises:
            FamilyError: the value has another type, or is null although it must not be.
        """
        absent = self._absent.get(key)
        value = self.given(key)
        if value is None:
            if null is _UNGIVEN and absent is not None and not isinstance(absent, bool):
                raise FamilyError(f"{self.where}: {key} is null; it needs {_WORDS[type(absent)]}, or leave it out")
            return null if null is not _UNGIVEN else False if absent is not None else None
        like = absent if absent is not None else None if null is _UNGIVEN else null
        if like is not None:
            self._check_type(key, value, type(like))
        return value

    def given(self, key: str) -> Any:
        """The value of ``key`` as it is; what its absence means if the file lacks it."""
        self._read.add(key)
        return self._keys[key] if key in self._keys else self._absent.get(key)

    def has(self, key: str) -> bool:
        """True if the file has ``key``, with a value other than null."""
        return self._keys.get(key) is not None

    def need(self, key: str) -> int:
        """The size under ``key``: a whole number above 0.

        Raises:
            FamilyError: the key is absent or null, or not such a number.
        """
        value, most = self.given(key), _MOST_OF.get(key, _MOST)
        if value is None:
            raise FamilyError(f"{self.where}: has no key {key}, which this family needs")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise FamilyError(f"{self.where}: {key} is {value!r}; use a whole number from 1 to {most}")
        return value

    def only(self, key: str, *valid: Any) -> Any:
        """Accept ``key`` only with one of these values; returns it. A flag may be null, which is "off".

        Another value, which this trainer cannot compute, is refused at the end.
        """
        value = self.given(key)
        if value is None and key not in self._keys:
            return valid[0]
        if value is None and False in valid:
            return False
        if value not in valid:
            listed = " or ".join(map(repr, valid))
            said = "is" if key in self._keys else "is absent, which means"
            self.refuse(f"{key} {said} {value!r}, but this trainer computes only {listed}")
            return valid[0]
        return value

    def refuse(self, problem: str) -> None:
        """Note a problem, which ``finish`` tells with all others."""
        self._problems.append(problem)

    def names_of(self, value: Any) -> str:
        """The keys that were read and have this value, for messages."""
        return " or ".join(sorted(key for key in self._read if key in self._keys and self._keys[key] == value))

    def finish(self) -> None:
        """Check that every key was read, and that each value can be computed.

        Raises:
            FamilyError: names all problems and the keys that nobody has read.
        """
        rest = sorted(self._keys.keys() - self._read - WITHOUT_EFFECT.keys() - self._without_effect.keys())
        for key in (key for key in rest if key in OFF and self._keys[key] not in OFF[key]):
            self.refuse(f"{key} is {self._keys[key]!r}, but this trainer computes this family only without it")
        unknown = [key for key in rest if key not in OFF]
        if unknown:
            self.refuse(
                f"the meaning of {', '.join(unknown)} is unknown, and leaving it out could change "
                "the model; remove the key if it has no effect on the model"
            )
        if self._problems:
            raise FamilyError(f"{self.where}: {'; '.join(self._problems)}")

    def _check_type(self, key: str, value: Any, kind: type) -> None:
        fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if fits and kind is int:
            fits = (0 if key in _MAY_BE_ZERO else 1) <= value <= _MOST_OF.get(key, _MOST)
        elif fits and kind is float:
            fits = math.isfinite(value) and value >= 0
        if not fits:
            most = f" up to {_MOST_OF[key]}" if key in _MOST_OF else ""
            raise FamilyError(f"{self.where}: {key} is {value!r}; use {_WORDS[kind]}{most}")
