"""Mock samples of T5, the same for every parallel layout: learnable, without a tokenizer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.masked.t5_dataset import NO_LABEL, T5Sample
from trainer.data.samples.mock import MockDataset

PAD, END = range(2)
FIRST_SENTINEL = 2
SPAN = 3
"""Tokens of a masked span."""


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
