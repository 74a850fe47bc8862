"""Long texts are cut to be encoded, and have the tokens that they have whole."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceTrainer

from tests.trainer.data.vocabularies import TEXTS, Vocabularies
from trainer.data.errors import DataError
from trainer.data.tokenizers import huggingface, long_texts, sentencepiece_model
from trainer.data.tokenizers.model_proto import read_model_proto
from trainer.data.tokenizers.opening import open_tokenizer
from trainer.data.tokenizers.sentencepiece_cuts import changes_spaces
from trainer.data.tokenizers.settings import TokenizerSettings

LONG_TEXT = "".join(TEXTS) + "one  two   three\nfour \n five a b c" * 20 + "日本語" * 99 + " and more, isn't it"


def count_parts(settings: TokenizerSettings, monkeypatch: pytest.MonkeyPatch, text: str = LONG_TEXT) -> int:
    """Into how many parts the text is cut, whose tokens are those of the whole."""
    whole = open_tokenizer(settings).encode(text)
    parts: list[str] = []

    def noting(text: str, encode: object, drop_space: bool = False) -> list[str]:
        found = list(long_texts.slices(text, encode, drop_space))  # type: ignore[arg-type]
        assert (" " if drop_space else "").join(found) == text
        parts.extend(found)
        return found

    with monkeypatch.context() as patch:
        for module in (huggingface, sentencepiece_model):
            patch.setattr(module, "slices", noting)
        for module in (huggingface, sentencepiece_model, long_texts):
            patch.setattr(module, "LONG", 200)
        patch.setattr(long_texts, "SLICE", 90)
        assert open_tokenizer(settings).encode(text) == whole
    return len(parts)


@pytest.mark.parametrize("kind", ["huggingface", "gpt2", "wordpiece"])
def test_long_texts_have_the_same_tokens(
    vocabularies: Vocabularies, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert count_parts(replace(vocabularies.settings(kind), engine="tokenizers"), monkeypatch) > 50


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": False}},
        {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}},
        {"normalizer": {"type": "Prepend", "prepend": "x"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": "\\d{1,3}"}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                ],
            }
        },
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": " ?[a-z]+( [a-z]+)?"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {
            "added_tokens": [
                {
                    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False),
                    "id": 300,
                    "content": "b c",
                }
            ]
        },
    ],
)
def test_what_depends_on_more_than_the_word_is_not_cut(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(tokenizer_file.read_text()) | changes))
    assert count_parts(TokenizerSettings(tokenizer_model=str(file), engine="tokenizers"), monkeypatch) == 0


METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
NORMALIZERS = [{"type": "Nmt"}, {"type": "NFKC"}, {"type": "Strip", "strip_left": False, "strip_right": True}, SPACES]


@pytest.mark.parametrize(
    ("cut", "is_cut"),
    [
        (METASPACE, True),
        (METASPACE | {"prepend_scheme": "first"}, True),
        ({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, METASPACE]}, True),
        (METASPACE | {"split": False}, False),
        (None, False),
    ],
)
def test_a_unigram_model_of_words_is_cut_and_one_of_whole_texts_is_not(
    vocabularies: Vocabularies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: object, is_cut: bool
) -> None:
    model = read_model_proto((vocabularies.folder / "unigram.model").read_bytes(), "unigram.model")
    pieces = [[piece.text, piece.score] for piece in model.pieces]
    content = {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": True},
        "normalizer": {"type": "Sequence", "normalizers": NORMALIZERS},
        "pre_tokenizer": cut,
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    assert (count_parts(TokenizerSettings(tokenizer_model=str(file)), monkeypatch) > 50) == is_cut


def trained(kind: str, **settings: Any) -> bytes:
    """A SentencePiece model of the text, by its library."""
    content = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(LONG_TEXT.splitlines()),
        model_writer=content,
        model_type=kind,
        vocab_size=500,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return content.getvalue()


SPACED = {"remove_extra_whitespaces": False}


@pytest.mark.parametrize(
    ("kind", "settings", "is_cut"),
    [
        ("bpe", {}, True),
        ("bpe", {"normalization_rule_name": "identity", "byte_fallback": True, **SPACED}, True),
        ("bpe", {"normalization_rule_name": "nmt_nfkc_cf", "user_defined_symbols": ["ka", "\n"]}, True),
        ("bpe", {"add_dummy_prefix": False, **SPACED}, True),
        # The space in front of what follows a cut would go.
        ("bpe", {"add_dummy_prefix": False}, False),
        ("bpe", {"treat_whitespace_as_suffix": True}, False),
        ("bpe", {"split_by_whitespace": False}, False),
        ("bpe", {"user_defined_symbols": ["one  t"]}, False),
        # What is equally likely is decided by how all that stands before was rounded.
        ("unigram", {}, False),
    ],
)
def test_sentencepieces_own_library_is_given_parts_where_nothing_reaches_across(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any], is_cut: bool
) -> None:
    file = tmp_path / "t.model"
    file.write_bytes(trained(kind, **settings))
    draw = random.Random(4)
    letters = [
        "a",
        "k",
        "ka",
        " ",
        "  ",
        " to ",
        " re",
        "\u0308",
        "\ufb01",
        "\uff41",
        "\u2581",
        "\n",
        "\u3000",
        "日",
        "1",
        "Z",
    ]
    for text in (LONG_TEXT, "".join(draw.choices(letters, k=9000))):
        chosen = TokenizerSettings(tokenizer_model=str(file), engine="sentencepiece")
        assert (count_parts(chosen, monkeypatch, text) > 50) == is_cut


@pytest.mark.parametrize(
    ("rule", "changes"),
    [("20", True), ("61 20", True), ("20 61", True), ("78 61 20 62", True), ("41 20", False), ("20 308", False)],
)
def test_rules_that_change_a_space_between_words_are_found(tmp_path: Path, rule: str, changes: bool) -> None:
    (tmp_path / "rules.tsv").write_text(f"{rule}\t62\n41\t61\n")
    model = read_model_proto(trained("bpe", normalization_rule_tsv=str(tmp_path / "rules.tsv")), "t.model")
    assert model.charsmap
    assert changes_spaces(model.charsmap) == changes


def test_damaged_rules_are_read_to_an_end() -> None:
    """Units that lead to each other, and sizes that are not there."""
    draw = random.Random(5)
    for size in (0, 3, 4, 7, 400, 4000):
        content = draw.randbytes(size)
        assert changes_spaces(content) in (True, False)
        assert changes_spaces(len(content).to_bytes(4, "little") + content) in (True, False)


def test_a_place_where_tokens_differ_is_no_seam() -> None:
    """Here "ab" is one token even across a space."""

    def encode(text: str) -> list[int]:
        return [len(token) for token in re.findall("a b|.", text)]

    text = "a b " * 400_000
    parts = list(long_texts.slices(text, encode))
    assert "".join(parts) == text
    assert len(parts) > 3
    assert all(part.endswith("b") for part in parts[:-1])
    # Where there is no seam the text stays whole.
    assert list(long_texts.slices("a1 b1 " * 200_000, encode)) == ["a1 b1 " * 200_000]


@pytest.mark.parametrize(
    ("kind", "library", "each"), [("unigram", "sentencepiece", 45), ("wordpiece", "tokenizers", 128)]
)
def test_memory_of_a_text_that_cannot_be_cut_is_told_and_has_an_end(
    vocabularies: Vocabularies,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    kind: str,
    library: str,
    each: int,
) -> None:
    """One is encoded whole, the other is cut between words, of which Japanese has none."""
    monkeypatch.setattr(long_texts, "TOLD_BYTES", 9000 * each)
    monkeypatch.setattr(long_texts, "MOST_BYTES", 90_000 * each)
    monkeypatch.setattr(huggingface, "LONG", 500)
    tokenizer = open_tokenizer(replace(vocabularies.settings(kind), engine=library))
    for letters, is_told in ((3000, False), (3001, True), (6000, False), (6003, True), (30_000, True)):
        assert len(tokenizer.encode("語" * letters))
        assert capfd.readouterr().err.count(f"GB of memory, as {library} cannot be given it in parts") == is_told
    with pytest.raises(DataError, match=r"divide the document \(plain text: --text-document paragraph or line\)"):
        tokenizer.encode("語" * 30_001)
