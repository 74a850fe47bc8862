"""Samples of whole sentences for BERT and T5, in endless epochs over one split.

Without ``num_samples`` every epoch has the same samples, so that a run can be extended and can start anywhere without
delay; the first epoch has Megatron-LM's order, epoch e the order of ``RandomState([seed, e])``. With ``num_samples``
all epochs of the run are shuffled together, as in Megatron-LM, and another number gives another order. The draws within
a sample (masked tokens, order of the parts) differ in each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.masked.mapping_cache import load_or_build_mapping
from trainer.data.masked.masking import check_tokens
from trainer.data.masked.sentence_mapping import LONG_SENTENCE, MappingRules

MAX_TOKENS = 1 << 20
"""Largest sample, including padding: enough for any such model, and 8 MiB for each array."""


def check_length(name: str, length: int, least: int, why: str) -> None:
    """Refuse an invalid sample length.

    Raises:
        DataError: names the setting ``name``; for a length below ``least`` also the reason ``why``.
    """
    if length < least:
        raise DataError(f"{name}: {length} {why}; use {least} or more")
    if length > MAX_TOKENS:
        raise DataError(f"{name}: {length:,} tokens are too many for a sample; use {MAX_TOKENS:,} or fewer")


class SentenceSamples:
    """Sentences and target length of each sample: the base of BertDataset and T5Dataset."""

    def __init__(
        self,
        tokens: IndexedDataset,
        documents: range,
        vocab_size: int,
        rules: MappingRules,
        num_samples: int | None = None,
        cache: Path | None = None,
    ) -> None:
        """Prepare samples of ``documents`` of ``tokens``, whose sequences are sentences.

        Args:
            tokens: the open indexed dataset.
            documents: documents of the split.
            vocab_size: vocabulary size of the tokenizer that made ``tokens``.
            rules: rules for concatenating sentences.
            num_samples: samples of the run, for Megatron-LM's order over all epochs of the run; None: see the module's
                docstring.
            cache: folder of cached mappings, which need not exist; None: no cache.

        Raises:
            DataError: no document is usable.
        """
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._mapping = rules
        self._entries = tokens.document_indices[documents.start : documents.stop + 1]
        self._rows = load_or_build_mapping(cache, self._entries, tokens.sequence_lengths, rules, num_samples)
        if not len(self._rows):
            raise DataError(self._unusable(len(documents)))
        self._is_joined = num_samples is not None
        self._idle: list[np.random.RandomState] = []
        self._order = (0, np.zeros(0, np.int64))

    def _unusable(self, documents: int) -> str:
        counts = np.diff(self._entries)
        least = self._mapping.least_sentences
        few = int((counts < least).sum())
        reasons = [f"{few:,} have fewer than {least} sentence{'s' if least > 1 else ''}"] if few else []
        if documents > few:
            reasons.append(f"{documents - few:,} have a sentence of more than {LONG_SENTENCE} tokens")
        remedy = "prepare the text with --split-sentences"
        if least > 1:
            remedy += ", or use samples of one part (--bert-no-binary-head)"
        why = " and ".join(reasons) or "the split is empty"
        return f"{self._tokens.prefix}: none of its {documents:,} documents is usable: {why}; {remedy}"

    def __len__(self) -> int:
        """Number of samples of an epoch, or of all epochs shuffled together."""
        return len(self._rows)

    @property
    def rows(self) -> npt.NDArray[np.integer[Any]]:
        """First sentence, end (exclusive) and target length of each sample, [N, 3]."""
        return self._rows

    def sentences(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Tokens, sentence lengths and target length of sample ``number``, counted over all epochs.

        Raises:
            DataError: the sample has a token outside the vocabulary.
        """
        first, last, target = self._rows[self._place(number)].tolist()
        lengths = self._tokens.sequence_lengths[first:last].astype(np.int64)
        start = self._tokens.first_token(first)
        found = np.empty(int(lengths.sum()), np.int64)
        self._tokens.read_into(start, start + len(found), found)
        check_tokens(found, self._vocab_size, f"{self._tokens.prefix}: sample {number:,}")
        return found, lengths, target

    @contextmanager
    def random(self, number: int) -> Iterator[np.random.RandomState]:
        """Random generator of sample ``number``, as in Megatron-LM; valid only within the ``with`` block."""
        # A new generator costs 100 us, reseeding 2 us. Several threads may use this method at once.
        try:
            state = self._idle.pop()
        except IndexError:
            state = np.random.RandomState(0)
        state.seed((self._mapping.seed + number) % (1 << 32))
        try:
            yield state
        finally:
            self._idle.append(state)

    def _place(self, number: int) -> int:
        epoch, place = divmod(number, len(self._rows))
        if self._is_joined or not epoch:
            return place
        # Read the attribute once: another thread may be in another epoch.
        current, order = self._order
        if current != epoch:
            order = np.random.RandomState([self._mapping.seed % (1 << 32), epoch]).permutation(len(self._rows))
            self._order = epoch, order
        return int(order[place])
