"""Splits that leave no sample for validation."""

import pytest

from trainer.config.blends import empty_split, parse_split
from trainer.data.samples.sources import split_sequences


@pytest.mark.parametrize(
    ("name", "sequences", "tokens", "split", "sample", "says"),
    [
        ("valid", 12, 10_000, "969,30,1", 129, "the valid split of corpus has no document: 12 documents are divided"),
        ("valid", 100, 1000, "969,30,1", 129, "has about 30 tokens, and one sample needs 129"),
        ("valid", 100, 100_000, "969,30,1", 129, ""),
        ("valid", 12, 10_000, "100,0,0", 129, ""),
        ("test", 12, 10_000, "50,0,50", 129, ""),
    ],
)
def test_a_split_without_a_sample_is_told(name, sequences, tokens, split, sample, says) -> None:
    found = empty_split(name, "corpus", sequences, tokens, split, sample)
    assert says in found and bool(found) == bool(says)


@pytest.mark.parametrize("split", ["969,30,1", "98,2,0", "1,1,1", "0,1,1"])
def test_the_split_is_that_of_training(split) -> None:
    for sequences in range(1, 400):
        _, valid, test = split_sequences(sequences, parse_split(split))
        for name, part in (("valid", valid), ("test", test)):
            said = empty_split(name, "corpus", sequences, 1000 * sequences, split, 1)
            assert ("has no document" in said) == (
                not part and parse_split(split)[2] > 0 or not part and name == "valid"
            )


def test_quotes_around_a_split_are_taken_off() -> None:
    assert parse_split("'99,1,0'") == parse_split("99,1,0")
