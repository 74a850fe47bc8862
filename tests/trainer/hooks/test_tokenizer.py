"""A tokenizer of the user's own: in data prepare, in a training on its data, and mistakes."""

import pickle

import pytest

from tests.trainer.hooks.hooked_run import EXAMPLE, log, rows, train
from tests.trainer.parity.deviation import LIMITS
from trainer.config.errors import ConfigError
from trainer.data.commands.preprocess import main
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import read_manifest
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.planning.build_config import build_config

LETTERS = "my_hooks:Letters"
OTHER = """
import my_hooks

class Other(my_hooks.Letters):
    def encode(self, text):
        return [len(word) for word in text.split()]
"""


class Words:
    """Lengths of words."""

    vocab_size, eod = 10, 9

    def encode(self, text):
        return [len(word) for word in text.split()]

    def decode(self, tokens):
        return " ".join("x" * token for token in tokens)


class Bare:
    pass


class Outside(Words):
    vocab_size, eod = 3, None


class EndOutside(Words):
    eod = 10


class Failing(Words):
    def encode(self, text):
        raise KeyError(text[0])


def opened(made):
    return open_tokenizer(TokenizerSettings(tokenizer_function=f"{__name__}:{made.__name__}"))


@pytest.fixture
def _example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.fixture
def prefix(tmp_path, _example):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "Line {number} of {"a b " * (number % 7)}text"}}\n' for number in range(300)))
    flags = ["--tokenizer-function", LETTERS, "--append-eod", "--workers", "2", "--output-prefix", str(tmp_path / "d")]
    assert main([str(text), *flags]) == 0
    return tmp_path / "d_text_document"


def test_prepared_data_has_its_tokens(prefix):
    data, manifest = IndexedDataset(prefix), read_manifest(prefix)
    assert (manifest.vocab_size, manifest.eod, manifest.documents) == (250, 249, 300)
    assert data[1].tolist() == [*b"line 1 of a b text", 249]
    tokenizer = open_tokenizer(TokenizerSettings(tokenizer_function=LETTERS))
    assert manifest.tokenizer_sha256 == tokenizer.sha256
    assert tokenizer.decode(data[1]) == "line 1 of a b text"
    again = pickle.loads(pickle.dumps(tokenizer))
    assert (again.sha256, again.encode("Ab")) == (tokenizer.sha256, [97, 98])


def test_every_layout_trains_on_its_data_as_one_rank_does(tmp_path, prefix):
    data = {"data_path": [str(prefix)], "tokenizer_function": LETTERS, "eod_mask_loss": True, "split": "90,10,0"}
    changes = {"data": data, "hooks": {"dataset_function": None}, "model": {"vocab_size": None}}
    serial, *others = [rows(train(tmp_path / layout, layout, **changes))[0] for layout in ("serial", "tp2", "pp2")]
    for other in others:
        losses = [[row["lm_loss"] for row in found.values()] for found in (other, serial)]
        assert losses[0] == pytest.approx(losses[1], abs=LIMITS["fp32"]["loss"])


def test_data_of_another_tokenizer_is_refused(tmp_path, prefix):
    (tmp_path / "mine.py").write_text(OTHER)
    data = {"data_path": [str(prefix)], "tokenizer_function": "mine:Other"}
    run = train(tmp_path / "run", "serial", folders=[tmp_path], code=3, data=data, hooks={"dataset_function": None})
    assert "was tokenized with another tokenizer" in log(run)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Bare, "without encode, decode, vocab_size, eod"),
        (Outside, "encodes a text as token 3, which is not below vocab_size 3"),
        (EndOutside, "has the eod 10; it is an id below vocab_size 10, or None"),
        (Failing, "fails to encode: KeyError: 'T'"),
    ],
)
def test_another_form_is_refused(made, said):
    with pytest.raises(DataError) as caught:
        opened(made)
    assert str(caught.value).startswith(f"data.tokenizer_function: {__name__}:{made.__name__} ")
    assert said in str(caught.value)


def test_a_missing_function_is_refused():
    with pytest.raises(DataError, match="data.tokenizer_function: no_such_module:make: no_such_module cannot be imp"):
        open_tokenizer(TokenizerSettings(tokenizer_function="no_such_module:make"))


def config(data, **model):
    return build_config(
        {
            "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, **model},
            "training": {"train_iters": 2, "seq_length": 8},
            "optimizer": {"lr": 1.0},
            "data": data,
        }
    )


@pytest.mark.parametrize(
    ("data", "model", "said"),
    [
        ({"tokenizer_model": "/t"}, {}, "data.tokenizer_model: cannot be combined with data.tokenizer_function"),
        ({"eod_token": "x"}, {}, "data.eod_token: cannot be combined with data.tokenizer_function"),
        ({"tokenizer_function": "mine"}, {}, "'mine' is not MODULE:FUNCTION"),
        ({}, {"architecture": "bert"}, "data.tokenizer_function: needs model.architecture decoder"),
    ],
)
def test_what_the_config_alone_shows_is_refused_before_the_queue(data, model, said):
    with pytest.raises(ConfigError) as caught:
        config({"tokenizer_function": "mine:make", **data}, **model)
    assert said in str(caught.value)
