"""Sizes of vocabularies and datasets, read without torch, are those that the trainer finds."""

from pathlib import Path

import numpy as np
import pytest

from tests.trainer.data.vocabularies import Vocabularies, make_vocabularies
from trainer.config.train_config import TrainConfig
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.planning.build_config import build_config
from trainer.planning.estimate.known_sizes import dataset_size, tokenizer_size, vocabulary_of
from trainer.planning.start_model import LocalFiles

REST = {
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1},
    "training": {"train_iters": 1, "seq_length": 8},
    "optimizer": {"lr": 1e-3},
}
READ = ("huggingface", "gpt2", "unigram", "bpe", "ranks", "wordpiece")


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Vocabularies:
    return make_vocabularies(tmp_path_factory.mktemp("vocabularies"))


def config_with(**data: object) -> TrainConfig:
    return build_config({**REST, "data": data})


@pytest.mark.parametrize("kind", READ)
def test_the_size_of_a_tokenizer_is_that_of_the_trainer(vocabularies: Vocabularies, kind: str) -> None:
    settings = vocabularies.settings(kind)
    named = {
        "tokenizer_type": settings.tokenizer_type,
        "tokenizer_model": settings.tokenizer_model,
        "vocab_file": settings.vocab_file,
        "tokenizer_special_tokens": list(settings.tokenizer_special_tokens),
    }
    config = config_with(**{key: value for key, value in named.items() if value})
    assert tokenizer_size(config, LocalFiles()) == vocabularies.open(kind).vocab_size


def test_a_file_that_is_not_a_tokenizer_gives_no_size(tmp_path: Path, vocabularies: Vocabularies) -> None:
    whole = Path(str(vocabularies.settings("bpe").tokenizer_model)).read_bytes()
    for name, content in (
        ("tokenizer.json", b"{}"),
        ("other.json", b'{"model": [3]}'),
        ("cut.json", b"{"),
        ("list.json", b"[]"),
        ("x.model", whole[: len(whole) // 2]),
        ("y.gguf", b"GGUF\x03\0\0\0"),
        ("z.txt", b"\xff\xfe"),
    ):
        (tmp_path / name).write_bytes(content)
        assert tokenizer_size(config_with(tokenizer_model=str(tmp_path / name)), LocalFiles()) is None, name
    assert tokenizer_size(config_with(tokenizer_model=str(tmp_path / "none")), LocalFiles()) is None


def test_tokens_of_an_index_without_a_manifest(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    lengths = np.array([3, 0, 5], np.int32)
    offsets = np.array([0, 6, 6], np.int64)
    header = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + b"\x08" + np.array([3, 4], "<u8").tobytes()
    documents = np.array([0, 1, 2, 3], np.int64)
    (tmp_path / "d.idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + documents.tobytes())
    (tmp_path / "d.bin").write_bytes(np.arange(8, dtype=np.uint16).tobytes())
    config = config_with(data_path=[str(prefix)])
    found = dataset_size(config, LocalFiles())
    with IndexedDataset(prefix) as tokens:
        assert found.tokens == 8 == sum(len(tokens[sequence]) for sequence in range(len(tokens)))
    assert vocabulary_of(config, found, LocalFiles()) is None
    (tmp_path / "d.json").write_text('{"tokens": 8, "vocab_size": 77}')
    assert vocabulary_of(config, dataset_size(config, LocalFiles()), LocalFiles()) == 77
