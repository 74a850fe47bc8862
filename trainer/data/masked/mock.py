"""Mock samples of BERT and T5, the same for every parallel layout: learnable, without a tokenizer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.masked.bert_dataset import BECOMES_MASK, NO_LABEL, SPECIAL, STAYS, BertSample
from trainer.data.masked.t5_dataset import T5Sample
from trainer.data.samples.mock import MockDataset

PAD, CLS, SEP, MASK = range(4)
FIRST_WORD = 4
"""BERT: smaller ids are special tokens."""
END = 1
"""T5: ends the decoder's text; 0 is padding here too."""
FIRST_SENTINEL = 2
SPAN = 3
"""T5: tokens of a masked span."""


class MockBertSamples:
    """BERT samples of the random walks of MockDataset, whose neighbours tell masked tokens and the order of parts."""

    def __init__(
        self, vocab_size: int, seq_length: int, seed: int, split: int, *, mask_prob: float, has_parts: bool
    ) -> None:
        """Prepare samples.

        Args:
            vocab_size: number of token ids, special tokens included.
            seq_length: tokens of a sample, special tokens and padding included.
            seed: seed of the samples.
            split: number of the split.
            mask_prob: share of masked tokens.
            has_parts: samples have two parts, which may be swapped.

        Raises:
            DataError: too few token ids, or samples too short.
        """
        if vocab_size <= FIRST_WORD:
            raise DataError(
                f"model.vocab_size: {vocab_size} has no room for words; use {FIRST_WORD + 1} or more with mock_data"
            )
        if seq_length < SPECIAL + 2:
            raise DataError(f"training.seq_length: {seq_length} is too short for two parts; use {SPECIAL + 2} or more")
        self._vocab_size = vocab_size
        self._seq_length = seq_length
        self._address = (seed % (1 << 32), split)
        self._mask_prob = mask_prob
        self._has_parts = has_parts
        self._walks = MockDataset(vocab_size - FIRST_WORD, seq_length, seed, split)

    def sample(self, number: int) -> BertSample:
        """Sample ``number``, of half to all of the length, padded."""
        random = np.random.default_rng((*self._address, number))
        words = int(random.integers(max(2, self._seq_length // 2 - SPECIAL), self._seq_length - SPECIAL + 1))
        text = self._walks.sample(number)[:words] + FIRST_WORD
        cut = int(random.integers(1, words)) if self._has_parts else words
        is_random = self._has_parts and bool(random.random() < 0.5)
        first, second = (text[cut:], text[:cut]) if is_random else (text[:cut], text[cut:])
        joined = [CLS, *first.tolist(), SEP, *([*second.tolist(), SEP] if self._has_parts else [])]
        filled = len(joined)
        tokens = np.full(self._seq_length, PAD, np.int64)
        tokens[:filled] = joined
        is_hidden = (tokens >= FIRST_WORD) & (random.random(self._seq_length) < self._mask_prob)
        is_hidden[1] = is_hidden[1] or not is_hidden.any()
        fate = random.random((2, self._seq_length))
        others = random.integers(FIRST_WORD, self._vocab_size, self._seq_length)
        shown = np.where(fate[0] < BECOMES_MASK, MASK, np.where(fate[1] < STAYS, tokens, others))
        places = np.arange(self._seq_length)
        return BertSample(
            tokens=np.where(is_hidden, shown, tokens),
            types=((places >= len(first) + 2) & (places < filled)).astype(np.int64),
            labels=np.where(is_hidden, tokens, NO_LABEL),
            loss_mask=is_hidden,
            padding_mask=places < filled,
            is_random=is_random,
            truncated=False,
        )


class MockT5Samples:
    """T5 samples of the random walks of MockDataset, of which the tokens around a masked span tell much."""

    def __init__(self, vocab_size: int, lengths: tuple[int, int], seed: int, split: int, *, mask_prob: float) -> None:
        """Prepare samples.

        Args:
            vocab_size: number of token ids: padding, end, a sentinel for each span, words.
            lengths: tokens of the encoder and of the decoder, padding included.
            seed: seed of the samples.
            split: number of the split.
            mask_prob: share of masked tokens.

        Raises:
            DataError: too few token ids, or samples too short.
        """
        encoder, decoder = lengths
        if encoder < 2 * SPAN or decoder < SPAN + 2:
            raise DataError(
                f"training.seq_length and decoder_seq_length: {encoder} and {decoder} are too short for a span; use "
                f"{2 * SPAN} and {SPAN + 2} or more"
            )
        self._most_spans = max(1, min(round(mask_prob * encoder / SPAN), (decoder - 1) // (SPAN + 1)))
        self._first_word = FIRST_SENTINEL + self._most_spans
        if vocab_size <= self._first_word:
            raise DataError(
                f"model.vocab_size: {vocab_size} has no room for words; mock_data needs {self._first_word + 1} or more"
            )
        self._lengths = lengths
        self._address = (seed % (1 << 32), split)
        self._mask_prob = mask_prob
        self._walks = MockDataset(vocab_size - self._first_word, encoder, seed, split)

    def sample(self, number: int) -> T5Sample:
        """Sample ``number``, of half to all of the encoder's length."""
        random = np.random.default_rng((*self._address, number))
        words = int(random.integers(max(2 * SPAN, self._lengths[0] // 2), self._lengths[0] + 1))
        text = self._walks.sample(number)[:words] + self._first_word
        spans = min(self._most_spans, max(1, round(self._mask_prob * words / SPAN)))
        starts = np.sort(random.choice(words // SPAN, spans, replace=False)) * SPAN
        encoder: list[int] = []
        decoder = [PAD]
        done = 0
        for place, start in enumerate(starts.tolist()):
            encoder += [*text[done:start].tolist(), FIRST_SENTINEL + place]
            done = start + SPAN
            decoder += [FIRST_SENTINEL + place, *text[start:done].tolist()]
        encoder += text[done:].tolist()
        is_text, is_target = (
            np.arange(length) < len(part) for part, length in zip((encoder, decoder), self._lengths, strict=True)
        )
        return T5Sample(
            encoder_tokens=_padded(encoder, self._lengths[0], PAD),
            decoder_tokens=_padded(decoder, self._lengths[1], PAD),
            labels=_padded([*decoder[1:], END], self._lengths[1], NO_LABEL),
            loss_mask=is_target,
            encoder_mask=is_text,
            decoder_mask=is_target,
            truncated=False,
        )


def _padded(tokens: list[int], length: int, filler: int) -> npt.NDArray[np.int64]:
    whole = np.full(length, filler, np.int64)
    whole[: len(tokens)] = tokens
    return whole
