"""Sentence mapping of the library against numpy's, which is tested against Megatron-LM's recorded rows."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.data.masked.masked_corpus import VOCABULARY, RecordedPieces, made_documents, write_sentences
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.masked.bert_dataset import BertDataset
from trainer.data.masked.compiled_mapping import mapping_builder
from trainer.data.masked.masked_command import MANY_DOCUMENTS, library_for
from trainer.data.masked.sentence_mapping import MappingRules, build_mapping

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def compiled(kernel_library):
    found = mapping_builder(kernel_library.path)
    assert found is not build_mapping
    return found


def corpus(seed):
    """Documents of 0 to 11 sentences, some long, in an unaligned array."""
    random = np.random.RandomState(seed)
    per_document = random.randint(0, 12, 3000)
    lengths = random.randint(0, 60, per_document.sum()).astype("<i4")
    lengths[random.randint(0, len(lengths), 200)] = [512, 513] * 100
    documents = np.concatenate([[0], np.cumsum(per_document)]).astype("<i8")
    return tuple(np.frombuffer(b"\0" + part.tobytes(), "u1")[1:].view(part.dtype) for part in (documents, lengths))


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("short", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("num_samples", [None, 0, 12_000])
def test_rows_are_those_without_a_compiler(compiled, least, short, num_samples):
    documents, lengths = corpus(least)
    rules = MappingRules(100, short, 4321, least)
    for part in (documents, documents[40:2000], documents[:1], documents[:0]):
        requested = build_mapping(part, lengths, rules, num_samples)
        found = compiled(part, lengths, rules, num_samples)
        assert found.dtype == requested.dtype and np.array_equal(found, requested)
        assert (len(requested) > 1500) == (len(part) > 1 and num_samples != 0)


def test_rows_of_more_sentences_than_32_bits_count(compiled):
    lengths = np.broadcast_to(np.int32(30), 1 << 33)
    documents = np.arange(1 << 32, (1 << 32) + 500, 7)
    for seed in (3, -1, (1 << 63) - 1):
        rules = MappingRules(100, 0.1, seed)
        found = compiled(documents, lengths, rules)
        assert found.dtype == np.int64 and found.min(axis=0)[0] == 1 << 32
        assert np.array_equal(found, build_mapping(documents, lengths, rules))


def test_unusable_documents_give_no_epoch(compiled):
    documents, lengths = np.array([0, 1, 3]), np.array([9, 513, 2], np.int32)
    assert compiled(documents, lengths, MappingRules(20, 0.1, 3, 2), 100).shape == (0, 3)


def test_samples_are_the_same_with_the_library(tmp_path, kernel_library):
    with IndexedDataset(write_sentences(tmp_path / "d", made_documents(20, 4), len(VOCABULARY))) as tokens:
        plain, compiled = (
            BertDataset(tokens, range(20), 64, 5, RecordedPieces(), library=path)
            for path in (None, kernel_library.path)
        )
        assert np.array_equal(plain.rows, compiled.rows)
        assert np.array_equal(plain.sample(7).tokens, compiled.sample(7).tokens)


def test_many_documents_are_shown_with_the_existing_library(tmp_path, kernel_library):
    assert library_for(MANY_DOCUMENTS - 1, os.environ) is None
    assert library_for(MANY_DOCUMENTS, os.environ) == kernel_library.path
    for variables in ({"LLMCTL_CACHE_DIR": str(tmp_path)}, {"CXX": "'"}):
        assert library_for(MANY_DOCUMENTS, variables) is None
    assert not list(tmp_path.iterdir())


def test_without_a_library_numpy_is_used(tmp_path):
    (tmp_path / "damaged.so").write_bytes(b"\x7fELF")
    for path in (None, tmp_path / "none.so", tmp_path / "damaged.so", Path(np.__file__)):
        assert mapping_builder(path) is build_mapping
