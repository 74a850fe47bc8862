"""Samples of a dataset of the user's own (``hooks.dataset_function``): checked items in a resumable order.

``RandomState([seed, epoch])`` shuffles each epoch, unless the dataset has the attribute ``shuffle`` with the value
False.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.samples.batches import MaskedWindow
from trainer.data.samples.windows import Tokens
from trainer.hooks.user_function import UserFunction


class MapStyle(Protocol):
    """A dataset with items by number; see trainer.hooks.protocols.Dataset."""

    def __len__(self) -> int:
        """Number of items."""

    def __getitem__(self, index: int) -> Any:
        """Item ``index``: tokens [S + 1], or these and the labels that count [S]."""


class UserSamples:
    """Endless epochs over the items of one split."""

    def __init__(
        self, hook: UserFunction, split: str, dataset: MapStyle, seq_length: int, vocab_size: int, seed: int
    ) -> None:
        """Look at the first item, whose form all items have.

        Raises:
            HookError: the dataset or its first item has another form.
        """
        self._hook, self._split, self._dataset = hook, split, dataset
        self._seq_length, self._vocab_size, self._seed = seq_length, vocab_size, seed % (1 << 32)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise hook.error(f"returned {dataset!r} for split {split}; a dataset has len() and items by number")
        self.items = len(dataset)
        if not self.items:
            raise hook.error(f"returned a dataset without items for split {split}; return None if there is no split")
        self.is_shuffled = bool(getattr(dataset, "shuffle", True))
        self._epoch, self._order = -1, np.zeros(0, np.int64)
        self.has_masks = isinstance(self._item(0), tuple)
        self._read(0)

    def sample(self, number: int) -> Tokens | MaskedWindow:
        """Read sample ``number``, counted over all epochs.

        Raises:
            HookError: reading fails, or the item has another form than the first.
        """
        epoch, place = divmod(number, self.items)
        if not self.is_shuffled:
            return self._read(place)
        if epoch != self._epoch:
            self._order, self._epoch = np.random.RandomState([self._seed, epoch]).permutation(self.items), epoch
        return self._read(int(self._order[place]))

    def _item(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise self._hook.error(f"failed at {self._place(index)}: {type(error).__name__}: {error}") from error

    def _read(self, index: int) -> Tokens | MaskedWindow:
        item = self._item(index)
        if isinstance(item, tuple) != self.has_masks or (self.has_masks and len(item) != 2):
            raise self._wrong(index, "all items are tokens, or all are pairs of tokens and labels that count")
        tokens = self._tokens(item[0] if self.has_masks else item, index)
        if not self.has_masks:
            return tokens
        counts = np.asarray(item[1])
        if counts.shape != (self._seq_length,):
            raise self._wrong(
                index, f"labels that count have the shape [{self._seq_length}], one per label, not {[*counts.shape]}"
            )
        return MaskedWindow(tokens, counts.astype(np.bool_))

    def _tokens(self, item: Any, index: int) -> npt.NDArray[np.int64]:
        tokens = np.asarray(item)
        if tokens.shape != (self._seq_length + 1,) or tokens.dtype.kind not in "iu":
            raise self._wrong(
                index,
                f"tokens are integers of shape [{self._seq_length + 1}], training.seq_length + 1, not {tokens.dtype} "
                f"{[*tokens.shape]}",
            )
        outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if outside.size:
            raise self._wrong(index, f"token {outside[0]} is not in the vocabulary of {self._vocab_size}")
        return tokens.astype(np.int64)

    def _place(self, index: int) -> str:
        return f"item {index} of split {self._split}"

    def _wrong(self, index: int, problem: str) -> Exception:
        return self._hook.error(f"has a wrong {self._place(index)}: {problem}")


class UserOrder:
    """Order of the training samples, for checkpoints."""

    def __init__(self, place: str, samples: UserSamples, seed: int) -> None:
        self._state = {
            "hook": place,
            "items": samples.items,
            "is_shuffled": samples.is_shuffled,
            "seed": seed if samples.is_shuffled else None,
        }

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return dict(self._state)

    def restore(self, state: Mapping[str, Any], consumed_samples: int) -> str | None:
        """Check that the order is that of the checkpoint.

        Returns:
            A line if the checkpoint was trained on other data; else None.

        Raises:
            DataError: the order of the items has changed.
        """
        if "hook" not in state:
            return (
                "data: the checkpoint was trained on other data; hooks.dataset_function goes on at sample "
                f"{consumed_samples:,}"
            )
        words = {"items": "{} items", "is_shuffled": "shuffle {}", "seed": "training.seed {}"}
        for name, text in words.items():
            if state.get(name) != self._state[name]:
                then, now = (text.format(values.get(name)) for values in (state, self._state))
                raise DataError(
                    f"hooks.dataset_function: the checkpoint was trained with {then}, but this run has {now}, which "
                    "changes the order of the samples; restore the former value, or start a new run from the weights "
                    "with checkpoint.load and checkpoint.finetune"
                )
        return None
