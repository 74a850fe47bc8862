"""Sentence mappings against Megatron-LM's recorded mapping, and C++'s random streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.data.masked.masked_corpus import settings_of, write_sentences
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.masked import mersenne_twister
from trainer.data.masked.mapping_cache import load_or_build_mapping
from trainer.data.masked.mersenne_twister import shuffled_order, stream_32, stream_64
from trainer.data.masked.sentence_mapping import MappingRules, build_mapping
from trainer.data.masked.sentence_samples import SentenceSamples


def numbers(stream: Iterator[np.ndarray[Any, Any]], count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += next(stream).tolist()
    return found[:count]


def test_the_streams_are_those_of_the_standard() -> None:
    # [rand.predef] of the C++ standard specifies the 10,000th output of a default-constructed engine.
    assert numbers(stream_32(5489), 10_000)[-1] == 4123659995
    assert numbers(stream_64(5489), 10_000)[-1] == 9981545732273789042


def test_streams_continue_after_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = next(stream_64(1))[:3000].tolist()
    monkeypatch.setattr(mersenne_twister, "_ROUNDS", 3)
    assert len(next(stream_64(1))) < 1000
    assert numbers(stream_64(1), 3000) == whole


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 5000])
def test_the_shuffle_is_that_of_the_loop(count: int) -> None:
    wanted = list(range(count))
    random = iter(numbers(stream_64(9), max(0, count - 1)))
    for place in range(count - 1, 0, -1):
        other = next(random) % (place + 1)
        wanted[place], wanted[other] = wanted[other], wanted[place]
    assert shuffled_order(count, 9).tolist() == wanted


@pytest.mark.parametrize("case", ["bert", "t5", "none_short", "all_short", "limited"])
def test_mappings_are_megatrons(recorded_masks: dict[str, Any], case: str) -> None:
    asked = settings_of(recorded_masks, f"mapping/{case}")
    documents = np.concatenate([[0], np.cumsum(recorded_masks["sentences_per_document"])])
    rules = MappingRules(asked["longest"], asked["short"], asked["seed"], asked["least"])
    num_samples = None if asked["epochs"] == 1 else asked["most"]
    rows = build_mapping(documents, recorded_masks["sentences"], rules, num_samples)
    assert np.array_equal(rows, recorded_masks[f"mapping/{case}/rows"])


def test_shares_are_rounded_as_cpp_rounds() -> None:
    one_in = {share: MappingRules(10, share, 1).one_in for share in (0.0, 0.1, 0.3, 0.4, 1.0, 1e-300)}
    assert one_in == {0.0: 0, 0.1: 10, 0.3: 3, 0.4: 3, 1.0: 1, 1e-300: 1 << 32}


def one_by_one(documents: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], rules: MappingRules) -> list[list[int]]:
    """Samples of one epoch before the shuffle, by a plain loop over sentences."""
    draws = iter(numbers(stream_32(rules.seed), 10_000))

    def target() -> int:
        drawn = next(draws)
        return 2 + drawn % (rules.longest - 1) if drawn % rules.one_in == 0 else rules.longest

    rows = []
    for first, last in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
        if last - first < rules.least_sentences or (last - first > 1 and max(lengths[first:last]) > 512):
            continue
        begin, aim, size = first, target(), 0
        for sentence in range(first, last):
            size += int(lengths[sentence])
            left = last - sentence - 1
            if (size >= aim and left > 1 and sentence + 1 - begin >= rules.least_sentences) or left == 0:
                rows.append([begin, sentence + 1, aim])
                begin, aim, size = sentence + 1, target(), 0
    return rows


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("short", [0.4, 0.1])
def test_mappings_of_a_part_of_a_corpus(least: int, short: float) -> None:
    random = np.random.RandomState(least)
    per_document = random.randint(0, 12, 300)
    documents = np.concatenate([[0], np.cumsum(per_document)])[40:]
    lengths = random.randint(1, 60, per_document.sum()).astype(np.int32)
    lengths[random.randint(0, len(lengths), 20)] = 513
    rules = MappingRules(100, short, 5, least)
    rows = build_mapping(documents, lengths, rules)
    wanted = np.array(one_by_one(documents, lengths, rules))
    assert np.array_equal(rows, wanted[shuffled_order(len(wanted), 6)])
    assert not len(build_mapping(documents[:1], lengths, rules, 5))


def test_a_mapping_is_cached_and_a_damaged_one_is_not_used(tmp_path: Path) -> None:
    documents = np.arange(0, 3001, 3)
    lengths = np.full(3000, 7, np.int32)
    asked = (documents, lengths, MappingRules(20, 0.1, 3), None)
    built = build_mapping(*asked)
    assert np.array_equal(load_or_build_mapping(tmp_path / "cache", *asked, smallest=10), built)
    (entry,) = (tmp_path / "cache").iterdir()
    content = entry.read_bytes()
    # A valid entry is used as it is: here the entry of another seed.
    other = (documents, lengths, MappingRules(20, 0.1, 4), None)
    load_or_build_mapping(tmp_path / "other", *other, smallest=10)
    (of_other,) = (tmp_path / "other").iterdir()
    entry.write_bytes(of_other.read_bytes())
    assert not np.array_equal(load_or_build_mapping(tmp_path / "cache", *asked, smallest=10), built)
    for broken in (content[:-5], content[:10], b"", content[:-1] + bytes([content[-1] ^ 1])):
        entry.write_bytes(broken)
        assert np.array_equal(load_or_build_mapping(tmp_path / "cache", *asked, smallest=10), built)
        assert entry.read_bytes() == content
    assert np.array_equal(load_or_build_mapping(tmp_path / "cache", *other, smallest=10), build_mapping(*other))
    (tmp_path / "file").touch()
    assert np.array_equal(load_or_build_mapping(tmp_path / "file", *asked, smallest=10), built)
    load_or_build_mapping(tmp_path / "none", *asked)
    assert not (tmp_path / "none").exists()


def test_epochs_have_the_same_samples_in_another_order(tmp_path: Path) -> None:
    documents = [[[10 * number + part, part] for part in range(4)] for number in range(12)]
    with IndexedDataset(write_sentences(tmp_path / "d", documents, 200)) as tokens:
        samples = SentenceSamples(tokens, range(12), 200, MappingRules(4, 0.0, 3))
        count = len(samples)
        served = [
            [samples.sentences(number)[0].tolist() for number in range(e * count, e * count + count)] for e in (0, 1, 2)
        ]
        assert len({str(order) for order in served}) == 3
        assert len({str(sorted(order)) for order in served}) == 1
        assert samples.sentences(2 * count)[0].tolist() == served[2][0]
        assert samples.sentences(1)[0].tolist() == served[0][1]
        with samples.random(0) as first, samples.random(count) as second, samples.random(0) as third:
            drawn = [random.random_sample() for random in (first, second, third)]
        assert drawn[0] == drawn[2] == np.random.RandomState(3).random_sample() != drawn[1]
        joined = SentenceSamples(tokens, range(12), 200, MappingRules(4, 0.0, 3), 2 * count)
        assert len(joined) == 2 * count
        assert joined.sentences(2 * count)[0].tolist() == joined.sentences(0)[0].tolist()


@pytest.mark.parametrize(
    ("documents", "least", "reasons"),
    [
        (
            [[[1, 2]], [[3]]],
            2,
            ["none of its 2 documents is usable", "2 have fewer than 2 sentences", "one part"],
        ),
        ([[[1] * 513, [2]], [[3]]], 2, ["1 have fewer than 2", "1 have a sentence of more than 512 tokens"]),
        ([[]], 1, ["1 have fewer than 1 sentence;", "--split-sentences"]),
    ],
)
@pytest.mark.parametrize("num_samples", [None, 7])
def test_documents_without_a_sample_are_refused(
    tmp_path: Path, documents: list[list[list[int]]], least: int, reasons: list[str], num_samples: int | None
) -> None:
    with IndexedDataset(write_sentences(tmp_path / "d", documents, 10)) as tokens:
        with pytest.raises(DataError) as error:
            SentenceSamples(tokens, range(len(documents)), 10, MappingRules(20, 0.1, 3, least), num_samples)
        assert all(reason in str(error.value) for reason in reasons), error.value
        with pytest.raises(DataError, match="short_seq_prob: 1.5"):
            SentenceSamples(tokens, range(len(documents)), 10, MappingRules(20, 1.5, 3, least))
