"""tokenizer.json: the file format of the tokenizers library for every kind of vocabulary.

Vocabularies of GPT-2 and BERT are converted to the content of such a file first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from trainer.data.errors import DataError
from trainer.data.tokenizers.byte_level import bytes_of
from trainer.data.tokenizers.engines import EngineCandidate
from trainer.data.tokenizers.gigatoken_engine import GigatokenEngine, load_tokenizer_json
from trainer.data.tokenizers.long_texts import WholeTexts
from trainer.data.tokenizers.tokenizer import TokenBatch, join_lists
from trainer.data.tokenizers.words import WordPieces, words_by_prefix, words_by_suffix, words_by_text

SPACE_MARK = "\u2581"
"""Character that SentencePiece and compatible vocabularies write for a space."""
_BYTES_EACH = 190
"""Memory that the library takes per byte of text: 136 for prose, 190 for random letters."""


class HuggingFaceVocabulary:
    """The content of a tokenizer.json.

    Args:
        content: the parsed file.
        origin: name of the file, for messages.
        special_names: meaning -> name of a token, from files beside it.
        around: add the template's tokens around a text, and read names of special tokens in it as these tokens.

    Raises:
        DataError: the content is not a tokenizer, is a tokenizer with random results, or has duplicate ids.
    """

    def __init__(
        self, content: Any, origin: str, special_names: Mapping[str, str] | None = None, around: bool = False
    ) -> None:
        self.origin = origin
        self.special_names: Mapping[str, str] = special_names or {}
        self.special_ids: Mapping[str, int] = {}
        self._around = around
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise DataError(f"{origin}: is not a valid tokenizer.json: it has no model")
        # A saved truncation or padding must not apply.
        self._content = content | {"truncation": None, "padding": None}
        if content["model"].get("dropout"):
            raise DataError(f"{origin}: drops merges at random (model.dropout); set it to null")
        self._ids = _ids_of_pieces(self._model, origin)
        _check_merges(self._model.get("merges"), self._model.get("continuing_subword_prefix"), origin)
        self._added: list[dict[str, Any]] = content.get("added_tokens") or []
        _check_added(self._added, self._ids, origin)
        added = {token["content"]: token["id"] for token in self._added}
        self._names = self._ids | added
        # A file without added tokens does not declare special tokens.
        self.named: Mapping[str, int] = added or self._ids
        if not self._names:
            raise DataError(f"{origin}: is not a valid tokenizer.json: its vocabulary is empty")
        self.size = 1 + max(self._names.values())

    @property
    def _model(self) -> dict[str, Any]:
        model: dict[str, Any] = self._content["model"]
        return model

    @cached_property
    def _decoder(self) -> Any:
        return self._load_library()

    def _load_library(self) -> Any:
        from tokenizers import Tokenizer as Library

        try:
            library = Library.from_str(json.dumps(self._content))
        except Exception as error:  # the library raises no narrower class
            raise DataError(f"{self.origin}: is not a valid tokenizer.json: {error}") from None
        # Text that happens to spell a special token must remain text.
        library.encode_special_tokens = not self._around
        return library

    @cached_property
    def sha256(self) -> str:
        """Digest of the parts that determine the ids of a text, not their formatting."""
        parts = {name: _canonical(self._content.get(name)) for name in ("normalizer", "pre_tokenizer")}
        model = {name: value for name, value in self._model.items() if not _is_default(name, value)}
        if "merges" in model:
            model["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        parts["model"] = model
        parts["added_tokens"] = [token for token in self._added if self._around or not token.get("special")]
        parts["post_processor"] = self._content.get("post_processor") if self._around else None
        written = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(written.encode()).hexdigest()

    def id_of(self, name: str) -> int | None:
        """Return the id of the token ``name``."""
        return self._names.get(name)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, without special tokens."""
        text: str = self._decoder.decode(list(tokens), skip_special_tokens=True)
        return text

    def word_pieces(self) -> WordPieces:
        """Find words by the marks of this kind of vocabulary."""
        pieces: list[str] = [""] * self.size
        for piece, token in self._names.items():
            pieces[token] = piece
        if self._model.get("type") == "WordPiece":
            return words_by_prefix(pieces, self._model.get("continuing_subword_prefix") or "##")
        if self._model.get("end_of_word_suffix"):
            return words_by_suffix(pieces, self._model["end_of_word_suffix"])
        special = {token["id"] for token in self._added if token.get("special")}
        decode = _decode_bytes if self._is_byte_level else _decode_marks
        return words_by_text(None if token in special else decode(piece) for token, piece in enumerate(pieces))

    @property
    def _is_byte_level(self) -> bool:
        steps = _steps(self._content.get("pre_tokenizer"), "pretokenizers")
        steps += _steps(self._content.get("decoder"), "decoders")
        return any(step.get("type") == "ByteLevel" for step in steps)

    def engines(self) -> Sequence[EngineCandidate]:
        """List gigatoken for BPE; the tokenizers library is the reference."""
        candidates = [EngineCandidate("tokenizers", self._reference)]
        if self._model.get("type") == "BPE":
            candidates.insert(0, EngineCandidate("gigatoken", self._gigatoken))
        return candidates

    def _reference(self) -> LibraryEngine:
        return LibraryEngine(self._load_library(), self._around)

    def _gigatoken(self) -> GigatokenEngine:
        kept = [token for token in self._added if self._around or not token.get("special")]
        content = json.dumps(self._content | {"added_tokens": kept, "post_processor": None})
        before, after = self._template() if self._around else ((), ())
        return GigatokenEngine(lambda: load_tokenizer_json(content), before, after)

    def _template(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the template adds before and after every text."""
        library = self._load_library()
        found = library.encode("a", add_special_tokens=True)
        bare = len(library.encode("a", add_special_tokens=False).ids)
        first = next((place for place, added in enumerate(found.special_tokens_mask) if not added), 0)
        return tuple(found.ids[:first]), tuple(found.ids[first + bare :])


class LibraryEngine:
    """The tokenizers library, on as many threads as it chooses (TOKENIZERS_PARALLELISM).

    Args:
        library: the library's tokenizer with its vocabulary.
        around: add the template's tokens around a text.
    """

    def __init__(self, library: Any, around: bool) -> None:
        self._library = library
        self._around = around
        self._whole = WholeTexts("tokenizers", _BYTES_EACH)

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return the tokens of each text.

        Raises:
            DataError: a text would take too much memory.
        """
        for text in texts:
            self._whole.check(text)
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=self._around)
        return join_lists([encoding.ids for encoding in found])


def _ids_of_pieces(model: Mapping[str, Any], origin: str) -> dict[str, int]:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):  # Unigram: pieces with their scores
        wrong = next((e for e in vocabulary if not (isinstance(e, list) and e and isinstance(e[0], str))), None)
        if wrong is not None:
            raise DataError(f"{origin}: is not a valid tokenizer.json: {_cut(wrong)} is not a piece and score")
        return {entry[0]: token for token, entry in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict) or not all(type(token) is int for token in vocabulary.values()):
        raise DataError(f"{origin}: is not a valid tokenizer.json: its vocabulary has no ids")
    check_distinct(vocabulary, origin)
    return vocabulary


def check_distinct(vocabulary: Mapping[str, int], origin: str) -> None:
    """Reject a vocabulary with duplicate or negative ids.

    Raises:
        DataError: the message names the tokens.
    """
    owners: dict[int, str] = {}
    for piece, token in vocabulary.items():
        if token < 0 or token in owners:
            owner = f"to {owners[token]!r} and {piece!r}" if token in owners else f"to {piece!r}"
            raise DataError(f"{origin}: gives id {token} {owner}; every token needs a unique id, 0 or more")
        owners[token] = piece


def _check_merges(merges: Any, prefix: Any, origin: str) -> None:
    """Reject invalid merges, including those that would make the library abort the process."""
    for pair in merges if isinstance(merges, list) else [] if merges is None else [merges]:
        pieces = pair.split(" ") if isinstance(pair, str) else pair
        if not isinstance(pieces, list) or len(pieces) != 2 or not all(isinstance(piece, str) for piece in pieces):
            if isinstance(pair, str):
                continue  # a header line, or an error that the library reports
            raise DataError(f"{origin}: is not a valid tokenizer.json: {_cut(pair)} is not a merge of two pieces")
        if isinstance(prefix, str) and not pieces[1].startswith(prefix):
            raise DataError(
                f"{origin}: is not a valid tokenizer.json: the second piece of merge {_cut(pair)} does not "
                f"begin with model.continuing_subword_prefix, {prefix!r}"
            )


def _cut(value: Any) -> str:
    """Shorten a value of JSON for a message."""
    return repr(value)[:60]


def _check_added(added: Any, ids: Mapping[str, int], origin: str) -> None:
    owners = {token: piece for piece, token in ids.items()}
    for token in added if isinstance(added, list) else [added]:
        if not isinstance(token, dict) or type(token.get("id")) is not int or not isinstance(token.get("content"), str):
            raise DataError(f"{origin}: is not a valid tokenizer.json: {_cut(token)} is not an added token")
        owner = owners.setdefault(token["id"], token["content"])
        if owner != token["content"]:
            raise DataError(
                f"{origin}: gives id {token['id']} to {owner!r} and {token['content']!r}; every token needs a unique "
                "id, 0 or more"
            )


def _is_default(name: str, value: Any) -> bool:
    # By identity: the unk_id of a unigram model may be 0, which equals False. A dropout of 0 equals no dropout.
    return value is None or value is False or value == "" or (name == "dropout" and not value)


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    if not isinstance(part, dict):
        return []
    steps = part.get(inner) if part.get("type") == "Sequence" else [part]
    return [step for step in steps or [] if isinstance(step, dict)]


def _canonical(part: Any) -> Any:
    """Write out the defaults of a tokenizer.json's step; remove settings that change no id."""
    if isinstance(part, list):
        return [_canonical(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    step = {name: _canonical(value) for name, value in part.items()}
    if step.get("type") == "ByteLevel":
        step.pop("trim_offsets", None)
        step.setdefault("use_regex", True)
    return step


def _decode_bytes(piece: str) -> str:
    spelled = bytes_of(piece)
    return piece if spelled is None else spelled.decode("utf-8", "replace")


def _decode_marks(piece: str) -> str:
    return decode_byte_piece(piece) or piece.replace(SPACE_MARK, " ")


def decode_byte_piece(piece: str) -> str | None:
    """Return the text of a byte piece of SentencePiece, such as ``<0x0A>``, or None."""
    if len(piece) != 6 or not piece.startswith("<0x") or piece[5] != ">":
        return None
    try:
        return bytes([int(piece[3:5], 16)]).decode("utf-8", "replace")
    except ValueError:
        return None


def byte_level_content(vocabulary: Mapping[str, int], merges: Iterable[Sequence[str]]) -> dict[str, Any]:
    """Return the tokenizer.json of a GPT-2 BPE, without normalisation or special tokens."""
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": dict(vocabulary), "merges": [list(pair) for pair in merges]}
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    off = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": step,
        "post_processor": None,
        "decoder": step,
        "model": model | unset | off,
    }
