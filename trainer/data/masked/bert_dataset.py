"""BERT samples: two parts of a text, maybe swapped, with masked tokens.

Devlin et al. 2018 (arXiv:1810.04805): 80% of the masked tokens become [MASK], 10% a random token, and 10% stay. The two
parts are neighbours, and the task is to predict their order (Lan et al. 2019, ALBERT, arXiv:1909.11942). The samples
are exactly Megatron-LM's (megatron/core/datasets/bert_dataset.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.masked.masking import Ids, Masking, MaskingRules, Pieces, special_ids
from trainer.data.masked.sentence_mapping import MappingRules
from trainer.data.masked.sentence_samples import SentenceSamples, check_length

SPECIAL = 3
"""Special tokens per sample: [CLS] in front, [SEP] after each part."""
BECOMES_MASK, STAYS = 0.8, 0.5
"""Share of masked tokens that become [MASK], and share of the others that stay unchanged."""
NO_LABEL = -1


@dataclass(frozen=True)
class BertSample:
    """One sample; S is seq_length."""

    tokens: Ids
    """int64 [S]: [CLS] part A [SEP] part B [SEP], and padding."""
    types: Ids
    """int64 [S]: token types, 1 for part B, else 0."""
    labels: Ids
    """int64 [S]: original id of a masked token, elsewhere -1."""
    loss_mask: npt.NDArray[np.bool_]
    """[S]: True for a masked token."""
    padding_mask: npt.NDArray[np.bool_]
    """[S]: False for padding, and for a masked token that became [PAD] at random, as in Megatron-LM."""
    is_random: bool
    """True if part B precedes part A in the text."""
    truncated: bool
    """True if tokens were dropped."""


class BertDataset(SentenceSamples):
    """BERT samples of endless epochs over one split, in the order of SentenceSamples."""

    def __init__(
        self,
        tokens: IndexedDataset,
        documents: range,
        seq_length: int,
        seed: int,
        pieces: Pieces,
        masking: MaskingRules | None = None,
        short_seq_prob: float = 0.1,
        bert_binary_head: bool = True,
        num_samples: int | None = None,
        cache: Path | None = None,
    ) -> None:
        """Prepare samples of ``documents`` of ``tokens``, whose sequences are sentences.

        Needs no communication between processes.

        Args:
            tokens: the open indexed dataset.
            documents: documents of the split (trainer.data.samples.sources.split_sequences of their number).
            seq_length: tokens of a sample, including special tokens and padding; 5 to MAX_TOKENS.
            seed: seed of the order; sample i draws with seed + i.
            pieces: the tokenizer that made ``tokens``.
            masking: masking rules; None: Megatron-LM's defaults for BERT.
            short_seq_prob: share of samples with a shorter target length.
            bert_binary_head: True: samples have two parts; False: one part, and documents of one sentence are used too.
            num_samples: see SentenceSamples.
            cache: see SentenceSamples.

        Raises:
            DataError: a setting is out of range, the vocabulary lacks [CLS], [SEP] or [MASK], or no document is
                usable.
        """
        check_length(
            "seq_length", seq_length, SPECIAL + 2, "is too short for [CLS], two [SEP] and a token of each part"
        )
        found = special_ids(pieces, ("cls", "sep", "mask"), "BERT samples")
        self._cls, self._sep, self._mask = found["cls"], found["sep"], found["mask"]
        self._pad = pieces.specials.pad
        self._seq_length = seq_length
        self._has_parts = bert_binary_head
        self._rules = masking or MaskingRules()
        self._masking = Masking(self._rules, pieces.word_pieces())
        rules = MappingRules(seq_length - SPECIAL, short_seq_prob, seed, 2 if bert_binary_head else 1)
        super().__init__(tokens, documents, pieces.vocab_size, rules, num_samples, cache)

    def sample(self, number: int) -> BertSample:
        """Build sample ``number``, counted over all epochs.

        Raises:
            DataError: the sample has a token outside the vocabulary.
        """
        text, lengths, target = self.sentences(number)
        with self.random(number) as random:
            first, second, is_random = self._divide(text, lengths, random)
            first, second = _shorten(first, second, target, random)
            cls, sep = np.array([self._cls]), np.array([self._sep])
            tokens = np.concatenate([cls, first, sep, *([second, sep] if len(second) else [])])
            replaced, labels = self._hide(tokens, target, random)
        filled = len(tokens)
        types = np.zeros(self._seq_length, np.int64)
        types[len(first) + 2 : filled] = 1
        return BertSample(
            tokens=self._pad_to_length(replaced, self._pad or 0),
            types=types,
            labels=self._pad_to_length(labels, NO_LABEL),
            loss_mask=self._pad_to_length(labels, NO_LABEL) != NO_LABEL,
            padding_mask=self._pad_to_length([token != self._pad for token in replaced], 0) != 0,
            is_random=is_random,
            truncated=len(text) > target,
        )

    def _divide(self, text: Ids, lengths: Ids, random: np.random.RandomState) -> tuple[Ids, Ids, bool]:
        """Divide into two parts, and tell if they are swapped.

        Without a binary head the second is empty.
        """
        if not self._has_parts:
            return text, text[:0], False
        pivot = 1 if len(lengths) < 3 else int(random.randint(1, len(lengths)))
        cut = int(lengths[:pivot].sum())
        is_random = bool(random.random_sample() < 0.5)
        return (text[cut:], text[:cut], True) if is_random else (text[:cut], text[cut:], False)

    def _hide(self, tokens: Ids, target: int, random: np.random.RandomState) -> tuple[list[int], list[int]]:
        """Mask some of ``tokens``.

        Returns the tokens and the labels, the original ids or -1.
        """
        content = np.flatnonzero((tokens != self._cls) & (tokens != self._sep))
        starts = self._masking.word_starts(tokens)[content]
        places, replaced, labels = content.tolist(), tokens.tolist(), [NO_LABEL] * len(tokens)
        draw = random.random_sample
        for first, stop in self._masking.runs(starts, self._rules.most_hidden(len(tokens), target), random):
            for place in places[first:stop]:
                labels[place] = replaced[place]
                if draw() < BECOMES_MASK:
                    replaced[place] = self._mask
                elif draw() >= STAYS:
                    replaced[place] = int(random.randint(0, self._vocab_size))
        return replaced, labels

    def _pad_to_length(self, numbers: list[int], filler: int) -> Ids:
        whole = np.full(self._seq_length, filler, np.int64)
        whole[: len(numbers)] = numbers
        return whole


def _shorten(first: Ids, second: Ids, target: int, random: np.random.RandomState) -> Sequence[Ids]:
    """Drop tokens at random ends of the longer part, down to ``target`` in total."""
    parts = (first, second)
    if len(first) + len(second) <= target:
        return parts
    cuts = [[0, len(part)] for part in parts]
    sizes = [len(part) for part in parts]
    for is_front in (random.random_sample(sum(sizes) - target) < 0.5).tolist():
        longer = 0 if sizes[0] > sizes[1] else 1
        sizes[longer] -= 1
        if is_front:
            cuts[longer][0] += 1
        else:
            cuts[longer][1] -= 1
    return [part[start:stop] for part, (start, stop) in zip(parts, cuts, strict=True)]
