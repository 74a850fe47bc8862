"""Tokenizers of every kind: texts are restored, special tokens recognised, and pickled copies identical."""

from __future__ import annotations

import json
import pickle
import random
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from tests.trainer.data.vocabularies import KINDS, LOSSLESS, TEXTS, Vocabularies
from trainer.config.sections.data import DataConfig
from trainer.data.errors import DataError
from trainer.data.tokenizers.engines import hard_texts
from trainer.data.tokenizers.factory import load_tokenizer, open_tokenizer
from trainer.data.tokenizers.null import NullTokenizer
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import Tokenizer

SPACE_MARK = "\u2581"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tokenizer used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_is_restored(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", LOSSLESS)
def test_hard_texts_are_restored(vocabularies: Vocabularies, kind: str) -> None:
    tokenizer = vocabularies.open(kind)
    # SentencePiece writes its space mark for a space, and decodes the mark as a space.
    texts = [text.replace(SPACE_MARK, "_") for text in [*hard_texts(), *TEXTS[:8]]]
    batch = tokenizer.encode_batch(texts)
    assert (batch.tokens.dtype, batch.lengths.sum()) == (np.int32, len(batch.tokens))
    assert [tokenizer.decode(tokens.tolist()) for tokens in batch] == texts
    assert not {*np.unique(batch.tokens).tolist()} & {tokenizer.eod, tokenizer.specials.bos}
    assert [tokenizer.encode(text) for text in texts] == [tokens.tolist() for tokens in batch]
    assert len(tokenizer.encode_batch([])) == 0


def test_japanese_and_korean_words_are_known(vocabularies: Vocabularies) -> None:
    for kind in ("unigram", "bpe", "huggingface"):
        tokenizer = vocabularies.open(kind)
        for text in ("日本語の文章は空白がありません。", "한국어 문장입니다."):
            tokens = tokenizer.encode(text)
            assert len(tokens) < len(text) + 4, (kind, tokens)  # bytes would take three times as many
            assert tokenizer.decode(tokens) == text


_BERT_TEXT = "[PAD] [UNK] [CLS] [SEP] [MASK] they we ##ren the The cafe Café , naive ' t 日 本 語 ##s # 한국 ##어"
_BERT = _BERT_TEXT.split()


def test_wordpiece_cuts_as_bert_does(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(_BERT) + "\n")

    def cut(kind: str, text: str) -> tuple[list[str], list[int]]:
        tokenizer = open_tokenizer(TokenizerSettings(kind, str(tmp_path / "vocab.txt")))
        tokens = tokenizer.encode_batch([text]).tokens
        starts = tokenizer.word_pieces().starts(tokens)
        return [_BERT[token] for token in tokens], np.flatnonzero(~starts).tolist()

    lower, cased = "BertWordPieceLowerCase", "BertWordPieceCase"
    text = "They WEREN'T the\x00 Cafés, nai\u0308ve"
    assert cut(lower, text) == (["they", "we", "##ren", "'", "t", "the", "cafe", "##s", ",", "naive"], [2, 7])
    assert cut(cased, "The Cafés the") == (["The", "Café", "##s", "the"], [2])
    assert cut(cased, "Cafe") == (["[UNK]"], [])
    assert cut(cased, "日本語 한국어#") == (["日", "本", "語", "한국", "##어", "#"], [4])
    assert cut(cased, "the" * 34) == (["[UNK]"], [])
    assert cut(lower, "[CLS] [MASK]")[0] == ["[UNK]"] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_for_another_process_is_the_same(vocabularies: Vocabularies, kind: str) -> None:
    tokenizer = vocabularies.open(kind)
    copy: Tokenizer = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.engine, copy.vocab_size, copy.specials) == (tokenizer.engine, tokenizer.vocab_size, tokenizer.specials)
    assert copy.sha256 == tokenizer.sha256
    assert np.array_equal(copy.encode_batch(TEXTS[:20]).tokens, tokenizer.encode_batch(TEXTS[:20]).tokens)


def test_halves_of_surrogate_pairs_become_valid_utf8(vocabularies: Vocabularies) -> None:
    for kind in ("gpt2", "bpe", "unigram", "ranks"):
        tokenizer = vocabularies.open(kind)
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
        assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("\U0001f600")
    smile = vocabularies.open("gpt2").encode("\U0001f600")
    assert vocabularies.open("gpt2").decode(smile[:-1]) == "\ufffd"


def test_special_tokens_of_a_list_are_named_in_the_given_order(vocabularies: Vocabularies) -> None:
    names = ("</s>", "<unk>", "<s>", "<mask>", "<pad>", "<cls>", "<sep>", "<more>")
    settings = replace(vocabularies.settings("list"), tokenizer_special_tokens=names)
    plain, named = vocabularies.open("list"), open_tokenizer(settings)
    assert (plain.eod, named.eod) == (2, 0)
    assert named.vocab_size == plain.vocab_size  # all special tokens come before the ranks
    assert named.encode("a value") == plain.encode("a value")
    with pytest.raises(DataError, match="has 5 special tokens, but 8 are named; name fewer"):
        open_tokenizer(replace(settings, tiktoken_num_special_tokens=5))


def test_special_tokens_by_kind(vocabularies: Vocabularies) -> None:
    found = {kind: vocabularies.open(kind) for kind in KINDS}
    assert found["gpt2"].eod == found["huggingface"].eod == 0
    assert found["ranks"].eod == found["ranks"].vocab_size - 1 == 499
    names = found["list"].specials
    assert (names.unk, names.bos, names.eod, names.mask, names.pad, names.cls, names.sep) == (0, 1, 2, 3, 4, 5, 6)
    assert found["list"].vocab_size == 509
    assert min(found["list"].encode("".join(TEXTS))) >= 10
    pieces, library = found["unigram"].specials, SentencePieceProcessor(str(vocabularies.folder / "unigram.model"))
    ids = (library.unk_id(), library.bos_id(), library.eos_id(), library.pad_id())
    assert (pieces.unk, pieces.bos, pieces.eod, pieces.pad) == ids
    assert (pieces.unk, pieces.bos, pieces.eod, pieces.pad, pieces.cls, pieces.mask) == (0, 1, 2, 3, 4, 5)
    bert = found["wordpiece"].specials
    assert (bert.pad, bert.unk, bert.cls, bert.sep, bert.mask) == (0, 1, 2, 3, 4)
    assert (bert.eod, bert.bos) == (bert.sep, bert.cls)


def test_ranks_with_a_custom_pattern(vocabularies: Vocabularies) -> None:
    letters = open_tokenizer(replace(vocabularies.settings("ranks"), tiktoken_pattern=r"\p{L}|\P{L}"))
    assert letters.encode("the value") == [token for letter in "the value" for token in letters.encode(letter)]
    assert letters.decode(letters.encode("한국어 日本語")) == "한국어 日本語"
    assert letters.sha256 != vocabularies.open("ranks").sha256


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "ranks"])
def test_tokens_added_after_the_vocabulary(vocabularies: Vocabularies, kind: str) -> None:
    plain = vocabularies.open(kind)
    chosen = vocabularies.settings(kind)
    names = (*chosen.tokenizer_special_tokens, "<SEP>", "<pad>")
    tokenizer = open_tokenizer(replace(chosen, vocab_extra_ids=3, tokenizer_special_tokens=names, eod_token="<SEP>"))
    known = sum(token is not None for token in (plain.specials.pad if kind == "unigram" else None,))
    assert tokenizer.vocab_size == plain.vocab_size + 5 - known
    assert tokenizer.specials.sentinels == tuple(range(tokenizer.vocab_size - 3, tokenizer.vocab_size))
    assert tokenizer.eod == plain.vocab_size
    text = "a <extra_id_0> <SEP> b"
    assert tokenizer.encode(text) == plain.encode(text)
    assert tokenizer.decode([*tokenizer.encode("the"), *tokenizer.specials.sentinels]) == "the"
    assert tokenizer.sha256 == plain.sha256
    words = tokenizer.word_pieces()
    assert len(words.begins) == len(words.ends) == tokenizer.vocab_size
    assert words.begins[list(tokenizer.specials.sentinels)].all()


def test_a_template_is_added_on_request(vocabularies: Vocabularies, tmp_path: Path) -> None:
    content = json.loads((vocabularies.folder / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    without = open_tokenizer(TokenizerSettings(tokenizer_model=str(path)))
    assert without.sha256 == vocabularies.open("huggingface").sha256
    around = TokenizerSettings(tokenizer_model=str(path), tokenizer_hf_include_special_tokens=True)
    for engine in (None, "tokenizers"):
        tokenizer = open_tokenizer(replace(around, engine=engine))
        assert tokenizer.encode("a<|endoftext|>b") == [0, *without.encode("a"), 0, *without.encode("b")]
        assert tokenizer.encode("") == [0]
    assert tokenizer.sha256 != without.sha256


def test_special_tokens_in_a_text_for_the_two_files_of_gpt2(vocabularies: Vocabularies) -> None:
    """Tokens as transformers, and so Megatron-LM, gives them: the special token; by default its text stays text."""
    without = vocabularies.open("gpt2")
    settings = replace(vocabularies.settings("gpt2"), tokenizer_hf_include_special_tokens=True)
    text = "a<|endoftext|>b"
    eod = open_tokenizer(settings).eod
    assert open_tokenizer(settings).encode(text) == [*without.encode("a"), eod, *without.encode("b")]
    assert eod not in without.encode(text)


def test_the_fingerprint_is_of_the_content(vocabularies: Vocabularies, tmp_path: Path) -> None:
    assert len({vocabularies.open(kind).sha256 for kind in KINDS}) == len(KINDS) - 1  # gpt2 is the very tokenizer.json
    content = json.loads((vocabularies.folder / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["model"]["continuing_subword_prefix"] = ""
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content, indent=3))
    same, plain = open_tokenizer(TokenizerSettings(tokenizer_model=str(path))), vocabularies.open("huggingface")
    assert same.sha256 == plain.sha256
    assert same.encode(TEXTS[0]) == plain.encode(TEXTS[0])
    content["model"]["merges"].pop()
    path.write_text(json.dumps(content))
    assert open_tokenizer(TokenizerSettings(tokenizer_model=str(path))).sha256 != plain.sha256


def test_a_zero_is_not_a_missing_value(tmp_path: Path) -> None:
    path, known = tmp_path / "t.json", []
    for values in ({}, {"unk_id": None}, {"unk_id": 0}, {"dropout": 0.0}):
        path.write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0]], **values}}))
        known.append(open_tokenizer(TokenizerSettings(tokenizer_model=str(path))).sha256)
    assert [sha == known[0] for sha in known] == [True, True, False, True]


@pytest.mark.parametrize("kind", ["gpt2", "ranks", "bpe", "unigram"])
def test_words_begin_at_spaces_and_punctuation(vocabularies: Vocabularies, kind: str) -> None:
    tokenizer = vocabularies.open(kind)
    words = tokenizer.word_pieces()
    for text, whole in (
        ("unbelievable, usual\nones (naïve)", ["unbelievable", ",", "usual", "\n", "ones", "(", "naïve", ")"]),
        ("한국어 문장", ["한국어", "문장"]),
    ):
        tokens = tokenizer.encode_batch([text]).tokens
        starts = np.flatnonzero(words.starts(tokens)).tolist()
        found = [
            tokenizer.decode(tokens[start:stop].tolist())
            for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True)
        ]
        assert [word.strip(" ") for word in found if word.strip(" ")] == whole


def test_the_kind_of_a_folder_is_recognised(vocabularies: Vocabularies, tmp_path: Path) -> None:
    bert = tmp_path / "bert.txt"
    bert.write_bytes((vocabularies.folder / "vocab.txt").read_bytes())
    named = open_tokenizer(TokenizerSettings("BertWordPieceLowerCase", str(bert)))
    assert named.sha256 == vocabularies.open("wordpiece").sha256
    for name in ("vocab.json", "merges.txt"):
        gpt2 = open_tokenizer(TokenizerSettings("GPT2BPETokenizer", str(vocabularies.folder / "gpt2" / name)))
        assert gpt2.sha256 == vocabularies.open("gpt2").sha256
    for name, kind in (("tokenizer.json", "huggingface"), ("tokenizer.model", "unigram"), ("vocab.txt", "wordpiece")):
        folder = tmp_path / kind
        folder.mkdir()
        source = {"tokenizer.model": "unigram.model"}.get(name, name)
        (folder / name).write_bytes((vocabularies.folder / source).read_bytes())
        (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
        assert open_tokenizer(TokenizerSettings(tokenizer_model=str(folder))).sha256 == vocabularies.open(kind).sha256
    (tmp_path / "huggingface" / "tokenizer_config.json").write_text('{"eos_token": {"content": "x"}}')
    assert (
        load_tokenizer(DataConfig(tokenizer_model=str(tmp_path / "huggingface"))).eod
        == (vocabularies.open("huggingface").encode("x")[0])
    )


def test_null_tokenizer_is_megatrons() -> None:
    tokenizer = NullTokenizer(10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)
    assert tokenizer.encode(" 1 2\n9") == [1, 2, 9]
    assert [tokens.tolist() for tokens in tokenizer.encode_batch(["1 2", "", "3"])] == [[1, 2], [], [3]]
    assert tokenizer.decode([1, 2, 10]) == "1 2"
    for text in ("10", "-1", "x", "9" * 5000, "y" * 5000):
        with pytest.raises(DataError, match="NullTokenizer") as caught:
            tokenizer.encode(text)
        assert len(str(caught.value)) < 160
    assert load_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 10).sha256 == tokenizer.sha256


def test_documents_of_a_batch_are_views_of_one_array(vocabularies: Vocabularies) -> None:
    draw = random.Random(2)
    texts = ["".join(draw.choices(TEXTS, k=draw.randrange(3))) for _ in range(50)]
    for kind in ("gpt2", "unigram", "wordpiece"):
        batch = vocabularies.open(kind).encode_batch(texts)
        assert len(batch) == 50
        assert all(np.shares_memory(tokens, batch.tokens) for tokens in batch if len(tokens))
        assert [len(tokens) == 0 for tokens in batch] == [not text for text in texts]
