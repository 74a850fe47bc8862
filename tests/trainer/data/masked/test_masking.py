"""Masking: share of tokens, lengths of spans, and whole words only."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.data.errors import DataError
from trainer.data.masked.masking import Masking, MaskingRules
from trainer.data.tokenizers.words import WordPieces, words_by_prefix, words_by_text

PLAIN = WordPieces(np.ones(10, np.bool_), np.zeros(10, np.bool_))


@pytest.mark.parametrize(
    ("rules", "shares"),
    [
        (MaskingRules(), [6 / 11, 3 / 11, 2 / 11]),
        (MaskingRules(masking_use_longer_ngrams=True), [2 / 11, 3 / 11, 6 / 11]),
        (MaskingRules(masking_max_ngram=1), [1.0]),
        (
            MaskingRules(masking_max_ngram=5, masking_use_geometric_distribution=True),
            [0.2, 0.16, 0.128, 0.1024, 0.4096],
        ),
    ],
)
def test_lengths_of_spans(rules: MaskingRules, shares: list[float]) -> None:
    masking = Masking(rules, PLAIN)
    starts = np.ones(20_000, np.bool_)
    runs = [run for seed in range(30) for run in masking.runs(starts, 400, np.random.RandomState(seed))]
    lengths = np.array([stop - first for first, stop in runs])
    found = np.bincount(lengths, minlength=len(shares) + 1)[1:] / len(lengths)
    # Between 4,000 and 12,000 spans; about 1 in 50 would overlap another and is dropped.
    assert np.abs(found - shares).max() < 0.025, found
    assert rules.run_shares == pytest.approx(shares)
    assert rules.mean_run == pytest.approx(sum(share * size for size, share in enumerate(shares, 1)))
    assert np.array([first for first, _ in runs]).mean() == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_spans_are_whole_words_and_at_most_the_requested_number(seed: int) -> None:
    random = np.random.RandomState(seed)
    pieces = ["a", "##b", "c", "##d"]
    tokens = random.randint(0, 4, 500)
    masking = Masking(MaskingRules(), words_by_prefix(pieces, "##"))
    starts = masking.word_starts(tokens)
    places = {*np.flatnonzero(starts).tolist(), len(tokens)}
    runs = list(masking.runs(starts, 75, random))
    assert all(first in places and stop in places and first < stop for first, stop in runs)
    hidden = [place for first, stop in runs for place in range(first, stop)]
    assert len(set(hidden)) == len(hidden) == 75
    each = Masking(MaskingRules(masking_do_full_word=False), words_by_prefix(pieces, "##"))
    assert each.word_starts(tokens).all()


def test_words_that_are_too_long_are_not_masked() -> None:
    starts = np.zeros(40, np.bool_)
    starts[[0, 30]] = True
    masking = Masking(MaskingRules(masking_max_ngram=2), PLAIN)
    found = {tuple(masking.runs(starts, 12, np.random.RandomState(seed))) for seed in range(20)}
    assert found == {((30, 40),)}
    assert list(masking.runs(starts, 0.3, np.random.RandomState(0))) == []
    assert list(masking.runs(starts[:0], 3, np.random.RandomState(0))) == []


def test_share_of_masked_tokens() -> None:
    rules = MaskingRules(0.15)
    assert rules.most_hidden(100, 125) == 15
    assert rules.most_hidden(128, 125) == 0.15 * 125
    assert rules.most_hidden(3, 125) == 1
    assert rules.most_hidden(3, 2) == 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"mask_prob": 0.0}, "mask_prob: 0.0"), ({"mask_prob": 1.0}, "mask_prob"), ({"masking_max_ngram": 0}, "ngram: 0")],
)
def test_rules_outside_their_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        MaskingRules(**settings)  # type: ignore[arg-type]


def test_in_scripts_without_spaces_each_token_is_a_word() -> None:
    texts = ["日本", "語", "の", "ー", "テスト", "ไทย", "\u0e34", "a", " b", "한국", "어", "\ufffd"]
    begins = words_by_text(texts).starts(np.arange(len(texts)))
    assert [text for text, begin in zip(texts, begins, strict=True) if begin] == [*texts[:3], *texts[4:6], " b"]
