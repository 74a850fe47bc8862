"""T5 samples: a text with sentinels for masked spans, and the spans.

Raffel et al. 2019 (arXiv:1910.10683, section 3.1.4), with Megatron-LM's spans of words; the samples are exactly
Megatron-LM's (megatron/core/datasets/t5_dataset.py). The encoder reads ``a b <0> e <1>``, the decoder ``<bos> <0> c d
<1> f``, with the labels ``<0> c d <1> f <eod>``. Attention only needs the padding masks: no [S, S] masks are built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.masked.masking import Ids, Masking, MaskingRules, Pieces, special_ids
from trainer.data.masked.sentence_mapping import MappingRules
from trainer.data.masked.sentence_samples import SentenceSamples, check_length

SPECIAL = 2
"""Difference between encoder length and target length of a sample, as in Megatron-LM."""
NO_LABEL = -1


@dataclass(frozen=True)
class T5Sample:
    """One sample; E is encoder_seq_length, D decoder_seq_length."""

    encoder_tokens: Ids
    """int64 [E]: the text with sentinels in place of masked spans, and padding."""
    decoder_tokens: Ids
    """int64 [D]: the begin-of-sequence token, then each sentinel with its span, and padding."""
    labels: Ids
    """int64 [D]: the next token of each of ``decoder_tokens``; -1 for padding."""
    loss_mask: npt.NDArray[np.bool_]
    """[D]: True if the label counts in the loss."""
    encoder_mask: npt.NDArray[np.bool_]
    """[E]: False for padding."""
    decoder_mask: npt.NDArray[np.bool_]
    """[D]: False for padding."""
    truncated: bool
    """True if tokens were dropped at the end."""


class T5Dataset(SentenceSamples):
    """T5 samples of endless epochs over one split, in the order of SentenceSamples."""

    def __init__(
        self,
        tokens: IndexedDataset,
        documents: range,
        encoder_seq_length: int,
        decoder_seq_length: int,
        seed: int,
        pieces: Pieces,
        masking: MaskingRules | None = None,
        short_seq_prob: float = 0.1,
        num_samples: int | None = None,
        cache: Path | None = None,
    ) -> None:
        """Prepare samples of ``documents`` of ``tokens``, whose sequences are sentences.

        Needs no communication between processes. If a sample would need more sentinels or a longer decoder, at which
        Megatron-LM ends the run, fewer of its tokens are masked.

        Args:
            tokens: the open indexed dataset.
            documents: documents of the split (trainer.data.samples.sources.split_sequences of their number).
            encoder_seq_length: tokens of the encoder; 4 to MAX_TOKENS.
            decoder_seq_length: tokens of the decoder; 1 to MAX_TOKENS.
            seed: seed of the order; sample i draws with seed + i.
            pieces: the tokenizer that made ``tokens``.
            masking: masking rules; None: Megatron-LM's defaults for T5, spans of up to ten words.
            short_seq_prob: share of samples with a shorter target length.
            num_samples: see SentenceSamples.
            cache: see SentenceSamples.

        Raises:
            DataError: a setting is out of range; the vocabulary lacks sentinels, or tokens that begin and end the
                decoder's text; the decoder is too short for a usual sample; or no document is usable.
        """
        check_length("encoder_seq_length", encoder_seq_length, SPECIAL + 2, "is too short")
        check_length("decoder_seq_length", decoder_seq_length, 1, "is too short")
        self._rules = masking or MaskingRules(masking_max_ngram=10, masking_use_geometric_distribution=True)
        self._eod = special_ids(pieces, ("eod",), "T5 samples")["eod"]
        specials = pieces.specials
        # T5's vocabulary has no begin-of-sequence token; the decoder starts with padding instead.
        begins = specials.pad if specials.bos is None else specials.bos
        self._bos = special_ids(pieces, ("bos",), "T5 samples")["bos"] if begins is None else begins
        self._pad = specials.pad or 0
        self._sentinels = specials.sentinels
        self._never_hidden = [token for token in (specials.cls, specials.sep) if token is not None]
        self._lengths = (encoder_seq_length, decoder_seq_length)
        self._check_room()
        self._masking = Masking(self._rules, pieces.word_pieces())
        rules = MappingRules(encoder_seq_length - SPECIAL, short_seq_prob, seed)
        super().__init__(tokens, documents, pieces.vocab_size, rules, num_samples, cache)

    def _check_room(self) -> None:
        """Refuse sentinels or a decoder length that are insufficient even for a usual sample."""
        encoder, decoder = self._lengths
        hidden = int(self._rules.most_hidden(encoder - SPECIAL, encoder - SPECIAL))
        runs = max(1, math.ceil(hidden / self._rules.mean_run))
        if len(self._sentinels) < runs:
            raise DataError(
                f"T5 samples: the tokenizer has {len(self._sentinels)} sentinels (<extra_id_0>, ...), but "
                f"{encoder:,} tokens (encoder_seq_length) have about {runs:,} masked spans; use "
                f"--vocab-extra-ids {max(100, hidden):,}, or lower mask_prob"
            )
        if decoder < 1 + hidden + runs:
            raise DataError(
                f"decoder_seq_length: {decoder:,} is too short for the masked tokens of {encoder:,} tokens "
                f"(encoder_seq_length), about {hidden:,} in {runs:,} spans; use {1 + 2 * hidden:,}, or lower mask_prob"
            )

    def sample(self, number: int) -> T5Sample:
        """Build sample ``number``, counted over all epochs.

        Raises:
            DataError: the sample has a token outside the vocabulary.
        """
        text, _, target = self.sentences(number)
        tokens = text[:target]
        encoder: list[int] = []
        decoder = [self._bos]
        done = 0
        for run, sentinel in zip(self._runs(tokens, target, number), self._sentinels, strict=False):
            encoder += [*tokens[done : run[0]].tolist(), sentinel]
            decoder += [sentinel, *tokens[run].tolist()]
            done = run[-1] + 1
        encoder += tokens[done:].tolist()
        places = [np.arange(length) for length in self._lengths]
        return T5Sample(
            encoder_tokens=_padded(encoder, self._lengths[0], self._pad),
            decoder_tokens=_padded(decoder, self._lengths[1], self._pad),
            labels=_padded([*decoder[1:], self._eod], self._lengths[1], NO_LABEL),
            loss_mask=places[1] < len(decoder),
            encoder_mask=places[0] < len(encoder),
            decoder_mask=places[1] < len(decoder),
            truncated=len(text) > target,
        )

    def _runs(self, tokens: Ids, target: int, number: int) -> list[list[int]]:
        """Positions of each masked span, in the order of the text.

        Sentinels and decoder length limit the number of spans. [CLS] and [SEP], which may occur in the text if the
        vocabulary has them, are in no span; as in Megatron-LM, such a token inside a span is dropped.
        """
        content = np.flatnonzero(~np.isin(tokens, self._never_hidden))
        starts = self._masking.word_starts(tokens)[content]
        places = content.tolist()
        found: list[list[int]] = []
        room = self._lengths[1] - 1
        most = self._rules.most_hidden(len(tokens), target)
        with self.random(number) as random:
            for first, stop in self._masking.runs(starts, most, random):
                room -= 1 + stop - first
                if room < 0 or len(found) == len(self._sentinels):
                    break
                found.append(places[first:stop])
        return sorted(found)


def _padded(numbers: list[int], length: int, filler: int) -> Ids:
    whole = np.full(length, filler, np.int64)
    whole[: len(numbers)] = numbers
    return whole
