"""SentencePiece models: BPE and unigram, with or without byte fallback.

Source: Kudo and Richardson 2018 (arXiv:1808.06226).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from trainer.data.errors import DataError
from trainer.data.tokenizers.engines import EngineCandidate, EngineRefusal, missing_package
from trainer.data.tokenizers.gigatoken_engine import GigatokenEngine, load_tokenizer_json
from trainer.data.tokenizers.huggingface import SPACE_MARK, decode_byte_piece
from trainer.data.tokenizers.long_texts import WholeTexts
from trainer.data.tokenizers.model_proto import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    ModelProto,
    read_model_proto,
)
from trainer.data.tokenizers.tokenizer import TokenBatch, join_lists
from trainer.data.tokenizers.words import WordPieces, words_by_text


class SentencePieceVocabulary:
    """The content of a .model file.

    Args:
        content: of the file.
        origin: name of the file, for messages.
        special_names: meaning -> name of a token, from files beside it.

    Raises:
        DataError: the content is not a model.
    """

    def __init__(self, content: bytes, origin: str, special_names: Mapping[str, str]) -> None:
        self.origin = origin
        self.special_names = special_names
        self._content = content
        self._model = read_model_proto(self._content, self.origin)
        self.special_ids: Mapping[str, int] = self._model.special_ids
        self.size = len(self._model.pieces)
        self._ids = {piece.text: token for token, piece in enumerate(self._model.pieces)}
        special = (CONTROL, UNKNOWN, USER_DEFINED)
        self.named = {text: token for text, token in self._ids.items() if self._model.pieces[token].kind in special}

    @cached_property
    def _decoder(self) -> Any:
        return self._load_library()

    def _load_library(self) -> Any:
        try:
            from sentencepiece import SentencePieceProcessor

            return SentencePieceProcessor(model_proto=self._content)
        except ModuleNotFoundError:
            raise missing_package(self.origin, "sentencepiece") from None
        except Exception as error:  # the library raises RuntimeError for every problem
            raise DataError(f"{self.origin}: is not a SentencePiece model: {error}") from None

    @cached_property
    def sha256(self) -> str:
        """Digest of the pieces, the kind of model and its normalisation."""
        model = self._model
        digest = hashlib.sha256(struct.pack("<I?", model.model_type, model.suffix_space))
        digest.update(model.rules)
        for piece in model.pieces:
            text = piece.text.encode()
            digest.update(struct.pack("<IfB", len(text), piece.score, piece.kind) + text)
        return digest.hexdigest()

    def id_of(self, name: str) -> int | None:
        """Return the id of the piece ``name``."""
        return self._ids.get(name)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, without control pieces and the initial dummy space."""
        pieces = self._model.pieces
        kept = [token for token in tokens if pieces[token].kind not in (CONTROL, UNKNOWN)]
        text: str = self._decoder.decode(kept)
        return text

    def word_pieces(self) -> WordPieces:
        """Find words by the space before them."""
        return words_by_text(
            None
            if piece.kind in (CONTROL, UNKNOWN)
            else decode_byte_piece(piece.text) or piece.text.replace(SPACE_MARK, " ")
            for piece in self._model.pieces
        )

    def engines(self) -> Sequence[EngineCandidate]:
        """List gigatoken for BPE with byte fallback; the sentencepiece library is the reference."""
        reference = EngineCandidate("sentencepiece", lambda: LibraryEngine(self._load_library()))
        if self._model.model_type != BPE:
            return [reference]
        return [EngineCandidate("gigatoken", self._gigatoken), reference]

    def _gigatoken(self) -> GigatokenEngine:
        content = json.dumps(merges_content(self._model))
        return GigatokenEngine(lambda: load_tokenizer_json(content))


_BYTES_EACH = 45
"""Memory that the library takes per byte of text: 25 for prose, 41 for spaces only."""


class LibraryEngine:
    """The sentencepiece library, on the calling thread.

    Args:
        library: the library's processor with its model.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._whole = WholeTexts("sentencepiece", _BYTES_EACH)

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return the tokens of each text.

        Raises:
            DataError: a text would take too much memory.
        """
        for text in texts:
            self._whole.check(text)
        return join_lists(self._library.encode(list(texts), out_type=int, num_threads=1))


def _check_ties(texts: Sequence[str], scores: Mapping[str, float]) -> None:
    """Reject pieces of equal score, unless they are runs of one letter."""
    owners: dict[float, str] = {}
    for text in texts:
        owner = owners.setdefault(scores[text], text)
        if owner != text and len({*owner, *text}) > 1:
            raise EngineRefusal(f"its pieces {owner!r} and {text!r} have the same score")


def merges_content(model: ModelProto) -> dict[str, Any]:
    """Return the tokenizer.json that encodes like a BPE model.

    SentencePiece merges the two neighbours whose union is the piece of the highest score. A list of merges does the
    same if it contains every split of every piece into two pieces, in the order of the scores.

    Raises:
        EngineRefusal: a property of the model makes the two differ.
    """
    if model.charsmap or model.fewer_spaces or model.suffix_space or not model.escaped_spaces:
        raise EngineRefusal("it normalises text")
    kinds = {piece.kind for piece in model.pieces}
    if not kinds <= {NORMAL, UNKNOWN, CONTROL, BYTE} or BYTE not in kinds:
        raise EngineRefusal("it has user-defined pieces, or no byte pieces")
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind == NORMAL}
    longer = [text for text in scores if len(text) > 1]
    _check_ties(longer, scores)
    if any(letter not in scores for text in longer for letter in text):
        raise EngineRefusal("a piece has letters that are not pieces")
    cuts = [(text[:cut], text[cut:]) for text in longer for cut in range(1, len(text))]
    merges = [(left, right) for left, right in cuts if left in scores and right in scores]
    # Among pieces of equal score the leftmost comes first: a run of spaces grows from its left end.
    merges.sort(key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0]), -len(pair[1])))
    front = [{"type": "Prepend", "prepend": SPACE_MARK}] if model.dummy_prefix else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    unset = dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": [*front, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": next((piece.text for piece in model.pieces if piece.kind == UNKNOWN), None),
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece.text: token for token, piece in enumerate(model.pieces)},
            "merges": merges,
            **unset,
        },
    }
