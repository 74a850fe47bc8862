"""Tokenizers: text to token ids and back.

A tokenizer is one tokenizer.json file, which every published model has; the tokenizers library is imported only when
one is opened, so that training on prepared data needs no more than its ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.data.errors import DataError

if TYPE_CHECKING:
    from trainer.config import DataConfig

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "<eod>")
"""Names that published vocabularies give to the token between two documents, the most telling first."""


class Tokenizer(Protocol):
    """What the data side asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a document; None if the vocabulary has none."""

    @property
    def sha256(self) -> str:
        """Fingerprint of everything that decides which ids a text becomes."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without beginning or end tokens; names of special tokens in it are ordinary text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text, on as many threads as the library likes."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special tokens left out."""


class HuggingFaceTokenizer:
    """A tokenizer.json, read by the tokenizers library."""

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        """Open ``path``: a tokenizer.json, or a folder that holds one.

        Args:
            path: the file or folder.
            eod_token: name of the token that ends a document. None: the folder's tokenizer_config.json or the first
                of END_OF_DOCUMENT_NAMES that the vocabulary has.

        Raises:
            DataError: no such file, not a tokenizer, or no such token.
        """
        from tokenizers import Tokenizer as Library

        self.path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot read the tokenizer ({error.strerror}); name a tokenizer.json or its folder"
            ) from None
        try:
            self._library: Any = Library.from_buffer(content)
        except Exception as error:  # the library raises no narrower class
            raise DataError(f"{self.path}: is not a tokenizer.json that can be used: {error}") from None
        # Text that happens to spell a special token must not become one, nor be cut short by saved settings.
        self._library.encode_special_tokens = True
        self._library.no_truncation()
        self._library.no_padding()
        self._sha256 = hashlib.sha256(content).hexdigest()
        self._vocab_size = 1 + max(self._library.get_vocab(with_added_tokens=True).values())
        self._eod = self._find_eod(eod_token or _eos_token_beside(self.path))

    def _find_eod(self, name: str | None) -> int | None:
        if name is not None:
            token: int | None = self._library.token_to_id(name)
            if token is None:
                raise DataError(f"{self.path}: has no token {name!r} to end a document with; name one that it has")
            return token
        found = (self._library.token_to_id(candidate) for candidate in END_OF_DOCUMENT_NAMES)
        return next((token for token in found if token is not None), None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return self._vocab_size

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a document; None if the vocabulary has none."""
        return self._eod

    @property
    def sha256(self) -> str:
        """SHA-256 of tokenizer.json."""
        return self._sha256

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without beginning or end tokens; names of special tokens in it are ordinary text."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text, on as many threads as the library likes (TOKENIZERS_PARALLELISM)."""
        return [found.ids for found in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._library.decode(list(tokens), skip_special_tokens=True)
        return text


class NullTokenizer:
    """Text that is already ids in decimal, separated by spaces: Megatron-LM's NullTokenizer.

    ``numbers`` ids 0 .. numbers - 1 and one more, which ends a document.
    """

    def __init__(self, numbers: int) -> None:
        self._numbers = numbers

    @property
    def vocab_size(self) -> int:
        """The numbers and the end of a document."""
        return self._numbers + 1

    @property
    def eod(self) -> int | None:
        """The id after the last number."""
        return self._numbers

    @property
    def sha256(self) -> str:
        """Fingerprint of the size, which is all there is."""
        return hashlib.sha256(f"NullTokenizer {self._numbers}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The numbers that ``text`` spells.

        Raises:
            DataError: something in it is no number of this vocabulary.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads decimal ids separated by spaces: {error}") from None
        wrong = next((token for token in ids if not 0 <= token < self._numbers), None)
        if wrong is not None:
            raise DataError(f"NullTokenizer takes the numbers 0 to {self._numbers - 1}, not {wrong}")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """The numbers, separated by spaces, without the ends of documents."""
        return " ".join(str(token) for token in tokens if token != self._numbers)


def load_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that ``data.tokenizer_type`` and ``data.tokenizer_model`` name.

    Args:
        data: the config's data section.
        vocab_size: how many numbers a NullTokenizer takes.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    if data.tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise DataError("data.tokenizer_type: NullTokenizer needs model.vocab_size; set it")
        return NullTokenizer(vocab_size)
    if data.tokenizer_model is None:
        raise DataError("data.tokenizer_model: is unset; name a tokenizer.json or the folder that holds it")
    return HuggingFaceTokenizer(Path(data.tokenizer_model).expanduser())


def _eos_token_beside(tokenizer_file: Path) -> str | None:
    # tokenizer_config.json is where transformers says which of the special tokens ends a text.
    try:
        settings = json.loads((tokenizer_file.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    name = settings.get("eos_token") if isinstance(settings, dict) else None
    if isinstance(name, dict):
        name = name.get("content")
    return name if isinstance(name, str) else None
