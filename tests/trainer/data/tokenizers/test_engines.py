"""Fast engines agree with the references or are rejected, and respect their memory limit."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.data.vocabularies import KINDS, TEXTS, Vocabularies
from trainer.data.errors import DataError
from trainer.data.tokenizers import gigatoken_engine
from trainer.data.tokenizers.engines import EngineCandidate, EngineRefusal, choose_engine, hard_texts
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.gigatoken_engine import GigatokenEngine, load_tokenizer_json
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import TokenBatch, join_lists
from trainer.data.tokenizers.vocabulary import VocabularyTokenizer

PAIRS = [
    ("huggingface", "gigatoken", "tokenizers"),
    ("gpt2", "gigatoken", "tokenizers"),
    ("bpe", "gigatoken", "sentencepiece"),
    ("ranks", "gigatoken", "tiktoken"),
]


def awkward_texts() -> list[str]:
    """Return runs, mixtures of scripts, control characters and endless words."""
    draw = random.Random(3)
    letters = "aab  \n\t_=-'s1x.,日本ㅎ한é\u0301👩\u200d\x00\x7f\ufeff<|>"
    texts = ["".join(draw.choices(letters, k=draw.randrange(120))) for _ in range(200)]
    texts += ["".join(draw.choice(" =-a.\n") * draw.randrange(30) for _ in range(20)) for _ in range(50)]
    whole = "".join(TEXTS)
    texts += [whole[start : start + 700] for start in range(0, 7000, 611)]
    return [*texts, "a" * 20_000, " " * 20_000 + "x", "한국어" * 3000, *hard_texts()]


@pytest.mark.parametrize(("kind", "fast", "reference"), PAIRS)
def test_fast_engines_agree_with_the_references(
    vocabularies: Vocabularies, kind: str, fast: str, reference: str
) -> None:
    chosen = vocabularies.settings(kind)
    quick = open_tokenizer(TokenizerSettings(**(vars(chosen) | {"engine": fast})))
    slow = open_tokenizer(TokenizerSettings(**(vars(chosen) | {"engine": reference})))
    texts = awkward_texts()
    for text, one, other in zip(texts, quick.encode_batch(texts), slow.encode_batch(texts), strict=True):
        assert np.array_equal(one, other), repr(text[:200])
    assert open_tokenizer(chosen).engine == fast


def test_tiktoken_and_tokenizers_agree_on_one_vocabulary(vocabularies: Vocabularies) -> None:
    # The same merges as ranks and as a tokenizer.json, in which <|endoftext|> is 0, and the order of bytes differs.
    ranks = TokenizerSettings(**(vars(vocabularies.settings("ranks")) | {"tiktoken_pattern": "r50k"}))
    one, other = open_tokenizer(ranks), vocabularies.open("gpt2")
    for text in awkward_texts():
        found, expected = one.encode(text), other.encode(text)
        assert [token + 1 for token in found if token >= 256] == [token for token in expected if token > 256]
        assert len(found) == len(expected)


def test_without_the_fast_engine_the_next_is_used_and_reported(
    vocabularies: Vocabularies, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = {kind: vocabularies.open(kind) for kind in ("gpt2", "ranks", "bpe", "wordpiece")}
    assert all(tokenizer.notes == () for tokenizer in fast.values())
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    for kind, engine in (("gpt2", "tokenizers"), ("ranks", "tiktoken"), ("bpe", "sentencepiece")):
        slow = vocabularies.open(kind)
        assert slow.engine == engine
        missing = "gigatoken is not installed (pip install gigatoken)"
        assert slow.notes == (f"{missing}; {engine} encodes instead, to the same tokens but slower",)
        assert np.array_equal(slow.encode_batch(TEXTS).tokens, fast[kind].encode_batch(TEXTS).tokens)
    assert vocabularies.open("wordpiece").notes == ()
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"unigram.model: needs the package sentencepiece; install it: pip install"):
        vocabularies.open("unigram").encode("a")


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_frees_the_vocabulary(vocabularies: Vocabularies, kind: str) -> None:
    tokenizer = vocabularies.open(kind)
    assert isinstance(tokenizer, VocabularyTokenizer)
    expected = tokenizer.encode_batch(TEXTS)
    fast = open_tokenizer(replace(vocabularies.settings(kind), engine=tokenizer.engine))
    assert isinstance(fast, VocabularyTokenizer)
    vocabulary, encoder = weakref.ref(fast._vocabulary), fast.encoder()
    assert (encoder.vocab_size, encoder.eod) == (tokenizer.vocab_size, tokenizer.eod)
    del fast
    gc.collect()
    # An encoder with a reference engine may be made of the vocabulary.
    assert vocabulary() is None or tokenizer.engine != "gigatoken"
    assert np.array_equal(encoder.encode_batch(TEXTS).tokens, expected.tokens)


def test_an_encoder_opens_the_reference_for_texts_that_the_fast_engine_refuses(
    vocabularies: Vocabularies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> TokenBatch:
        raise EngineRefusal("it fails")

    tokenizer = vocabularies.open("gpt2")
    assert isinstance(tokenizer, VocabularyTokenizer)
    expected, encoder = tokenizer.encode_batch(TEXTS), tokenizer.encoder()
    monkeypatch.setattr(GigatokenEngine, "encode_batch", refuse)
    assert np.array_equal(encoder.encode_batch(TEXTS).tokens, expected.tokens)
    late = tokenizer.encoder()
    monkeypatch.setattr(VocabularyTokenizer, "sha256", property(lambda _: "0" * 64))
    with pytest.raises(DataError, match="the tokenizer was changed while it was in use"):
        late.encode_batch(TEXTS)


class Fixed:
    """An engine that returns one token for every text."""

    def __init__(self, token: int) -> None:
        self.token = token

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return join_lists([[self.token] for _ in texts])


class Failing(Fixed):
    """An engine that fails on the text "fail", and on empty texts."""

    def __init__(self) -> None:
        super().__init__(1)

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        if {"fail", ""} & {*texts}:
            raise EngineRefusal("it fails")
        return super().encode_batch(texts)


def test_texts_on_which_the_fast_engine_fails_are_encoded_by_the_reference() -> None:
    candidates = [EngineCandidate("fast", Failing), EngineCandidate("reference", lambda: Fixed(7))]
    engine = choose_engine(candidates, "fast", "v").engine
    assert [engine.encode_batch([text]).tokens.tolist() for text in ("a", "fail", "b")] == [[1], [7], [1]]


class PanicException(BaseException):
    """Same class name as pyo3's exception, which no module exports."""


@pytest.mark.parametrize("error", [ValueError("why"), PanicException("why")])
def test_any_failure_of_gigatoken_is_a_refusal_and_a_panic_reloads_it(error: BaseException) -> None:
    loads: list[object] = []

    class Library:
        def __init__(self) -> None:
            loads.append(self)
            self.is_poisoned = False

        def encode(self, text: str) -> np.ndarray[Any, Any]:
            self.is_poisoned |= text == "panic"
            if self.is_poisoned or text == "fail":
                raise error
            return np.array([1], np.uint32)

    is_panic = not isinstance(error, Exception)
    engine = GigatokenEngine(Library)
    with pytest.raises(EngineRefusal, match="why"):
        engine.encode_batch(["panic" if is_panic else "fail"])
    assert engine.encode_batch(["a"]).tokens.tolist() == [1]
    assert len(loads) == 1 + is_panic


def test_an_engine_that_fails_repeatedly_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    candidates = [EngineCandidate("fast", Failing), EngineCandidate("reference", lambda: Fixed(7))]
    engine = choose_engine(candidates, "fast", "v").engine
    for number in range(30):
        assert engine.encode_batch(["fail"]).tokens.tolist() == [7]
        assert ("fast has failed 10 times, now with: it fails" in capsys.readouterr().err) == (number == 9)


def test_only_an_engine_that_agrees_is_used() -> None:
    def refuse() -> Fixed:
        raise EngineRefusal("it cannot")

    reference = EngineCandidate("reference", lambda: Fixed(1))
    cases = ((lambda: Fixed(2), ", because its tokens differ"), (refuse, ": it cannot"), (Failing, ": it fails"))
    for fast, why in cases:
        choice = choose_engine([EngineCandidate("fast", fast), reference], None, "v")
        assert choice.name == "reference"
        assert choice.notes == (f"fast is not used{why}; reference encodes instead, to the same tokens but slower",)
    assert choose_engine([EngineCandidate("fast", lambda: Fixed(1)), reference], None, "v").name == "fast"
    assert choose_engine([EngineCandidate("fast", lambda: Fixed(2)), reference], "fast", "v").name == "fast"
    with pytest.raises(DataError, match=r"v: cannot be encoded by 'other', only by fast and reference"):
        choose_engine([EngineCandidate("fast", refuse), reference], "other", "v")
    with pytest.raises(DataError, match=r"v: cannot be encoded by fast: it cannot"):
        choose_engine([EngineCandidate("fast", refuse), reference], "fast", "v")


@pytest.mark.parametrize("is_known", [True, False])
def test_an_engine_that_has_grown_is_loaded_again(
    vocabularies: Vocabularies, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    content = (vocabularies.folder / "tokenizer.json").read_text()
    loads, resident = [], [0]

    def load() -> object:
        loads.append(len(loads))
        return load_tokenizer_json(content)

    monkeypatch.setattr(gigatoken_engine, "resident_bytes", lambda: resident[0] if is_known else None)
    monkeypatch.setattr(gigatoken_engine, "CHECK_CHARACTERS", 1000)
    monkeypatch.setattr(gigatoken_engine, "BLIND_CHARACTERS", 5000)
    engine = GigatokenEngine(load)
    first = engine.encode_batch(TEXTS).tokens
    assert len(loads) == 1
    engine.encode_batch(["a"])
    assert len(loads) == (1 if is_known else 2)
    resident[0] = gigatoken_engine.GROWTH_BYTES
    for _ in range(3):
        assert np.array_equal(engine.encode_batch(TEXTS).tokens, first)
    assert len(loads) == (2 if is_known else 4)


def test_memory_in_use_is_known_here() -> None:
    found = gigatoken_engine.resident_bytes()
    assert found is None or 10 << 20 < found < 1 << 40
    assert (found is not None) == Path("/proc/self/statm").exists()
