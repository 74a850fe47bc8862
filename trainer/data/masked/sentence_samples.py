"""The samples of whole sentences that BERT and T5 are made of: an endless sequence of epochs over one split.

Without a number of samples every epoch has the same samples, so that a run can be made longer and begins anywhere at
once; the first is in Megatron-LM's order, epoch e in that of ``RandomState([seed, e])``. With one, the epochs that it
takes are joined and shuffled together, as Megatron-LM does it, and another number is another order. What is drawn
within a sample (what is hidden, which part comes first) is another thing each time it comes round.
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
from trainer.data.masked.compiled_mapping import mapping_builder
from trainer.data.masked.mapping_cache import load_or_build_mapping
from trainer.data.masked.masking import check_tokens
from trainer.data.masked.sentence_mapping import LONG_SENTENCE, MappingRules

MOST_TOKENS = 1 << 20
"""Of a sample, padding included: as much as any model of sentences takes, and 8 MiB for each of its arrays."""


def check_length(name: str, length: int, least: int, why: str) -> None:
    """Refuse a length of samples that there cannot be.

    Raises:
        DataError: names the setting, ``name``, and for one below ``least`` also ``why``.
    """
    if length < least:
        raise DataError(f"{name}: {length} {why}; give {least} or more")
    if length > MOST_TOKENS:
        raise DataError(f"{name}: {length:,} tokens are more than a sample can have; give {MOST_TOKENS:,} or fewer")


class SentenceSamples:
    """Which sentences, and how many tokens of them, make sample i: what BertDataset and T5Dataset have in common."""

    def __init__(
        self,
        tokens: IndexedDataset,
        documents: range,
        vocab_size: int,
        rules: MappingRules,
        num_samples: int | None = None,
        cache: Path | None = None,
        library: Path | None = None,
    ) -> None:
        """Samples of ``documents`` of ``tokens``, whose sequences are sentences.

        Args:
            tokens: the open pair of files.
            documents: those of the split.
            vocab_size: of the tokenizer that made ``tokens``.
            rules: how sentences are joined.
            num_samples: length of the run, for Megatron-LM's order over all of its epochs; None: see above.
            cache: folder where the mapping is kept, which need not exist; None: nowhere.
            library: Library.path of trainer.ops.dispatch.library.load_built, with which the mapping of a large corpus
            takes
                a tenth of the time; None: numpy alone, with the same result.

        Raises:
            DataError: no document can be used.
        """
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._mapping = rules
        self._entries = tokens.document_indices[documents.start : documents.stop + 1]
        self._rows = load_or_build_mapping(
            cache, self._entries, tokens.sequence_lengths, rules, num_samples, build=mapping_builder(library)
        )
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
            remedy += ", or make samples of one part (bert_binary_head false, --bert-no-binary-head)"
        why = " and ".join(reasons) or "there is none"
        return f"{self._tokens.prefix}: no sample can be made of its {documents:,} documents: {why}; {remedy}"

    def __len__(self) -> int:
        """Samples until it begins anew: of one epoch, or of those that are shuffled together."""
        return len(self._rows)

    @property
    def rows(self) -> npt.NDArray[np.integer[Any]]:
        """First sentence, one after the last, and target length of each of them, [N, 3]."""
        return self._rows

    def sentences(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Sample ``number``, counted over all epochs: its tokens, the lengths of its sentences, its target length.

        Raises:
            DataError: it holds a token outside the vocabulary.
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
        """Where the numbers of sample ``number`` come from, as in Megatron-LM; no longer than the block."""
        # A new one costs 100 us, of which the seed is 2; several threads may be at it at once.
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
        # Read once: another thread may be at another epoch.
        current, order = self._order
        if current != epoch:
            order = np.random.RandomState([self._mapping.seed % (1 << 32), epoch]).permutation(len(self._rows))
            self._order = epoch, order
        return int(order[place])
