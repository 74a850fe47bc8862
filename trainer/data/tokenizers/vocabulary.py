"""Tokenizer from a vocabulary of any kind and an engine that encodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from trainer.data.errors import DataError
from trainer.data.tokenizers.engines import Choice, Engine, EngineCandidate, choose_engine
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.special_names import find_specials, sentinel_name
from trainer.data.tokenizers.tokenizer import Encoder, SpecialTokens, TokenBatch, Tokenizer
from trainer.data.tokenizers.words import WordPieces


class Vocabulary(Protocol):
    """The files of a tokenizer, read and checked."""

    @property
    def origin(self) -> str:
        """The file, for messages."""

    @property
    def size(self) -> int:
        """One more than the largest id."""

    @property
    def sha256(self) -> str:
        """Digest, in hexadecimal, of everything that determines the ids of a text."""

    @property
    def named(self) -> Mapping[str, int]:
        """Ids of special tokens by name."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Meaning (as in SpecialTokens) -> id, declared by the vocabulary itself."""

    @property
    def special_names(self) -> Mapping[str, str]:
        """Meaning -> name of a token, declared by files beside the vocabulary."""

    def id_of(self, name: str) -> int | None:
        """Return the id of any token by its name; None for an unknown name."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, all below ``size``, without special tokens."""

    def word_pieces(self) -> WordPieces:
        """Return flags of the tokens, below ``size``, that begin a word."""

    def engines(self) -> Sequence[EngineCandidate]:
        """Return the engines that may encode, the fastest first, the reference last."""


class VocabularyTokenizer:
    """A vocabulary, and tokens added after it. The engine is chosen on first use.

    Args:
        vocabulary: content of the files.
        settings: settings by which the files were opened.
        reopen: opens the files again, in the process that unpickles this tokenizer.

    Raises:
        DataError: the vocabulary has no token with the requested name for the end of a document; on first use, no
            engine is installed or can load the vocabulary.
    """

    def __init__(
        self, vocabulary: Vocabulary, settings: TokenizerSettings, reopen: Callable[[TokenizerSettings], Tokenizer]
    ) -> None:
        self._vocabulary = vocabulary
        self._settings = settings
        self._reopen = reopen
        names = [*settings.tokenizer_special_tokens, *map(sentinel_name, range(settings.vocab_extra_ids))]
        absent = [name for name in dict.fromkeys(names) if name not in vocabulary.named]
        self._added = {name: vocabulary.size + place for place, name in enumerate(absent)}
        self._specials = find_specials(
            self._id_of,
            {**vocabulary.named, **self._added},
            vocabulary.special_ids,
            vocabulary.special_names,
            settings.eod_token,
            vocabulary.origin,
        )

    @cached_property
    def _choice(self) -> Choice:
        # Chosen on demand: a rank of a training run, which needs only ids and the fingerprint, loads no library.
        return choose_engine(self._vocabulary.engines(), self._settings.engine, self._vocabulary.origin)

    def encoder(self) -> Encoder:
        """Return an encoder without the vocabulary, which takes 27 MB for GPT-2's."""
        candidates = [*self._vocabulary.engines()]
        reference, settings, reopen, sha256 = candidates[-1].name, self._settings, self._reopen, self.sha256

        def open_reference() -> Engine:
            opened = reopen(replace(settings, engine=reference))
            if opened.sha256 != sha256:
                raise DataError(
                    f"{settings.name}: the tokenizer was changed while it was in use (its sha256 was {sha256[:12]}, "
                    f"and is now {opened.sha256[:12]}); restore it, or start over with --restart"
                )
            return opened

        wanted = settings.engine or self.engine
        if wanted != reference:
            candidates[-1] = EngineCandidate(reference, open_reference)
        engine = choose_engine(candidates, wanted, self._vocabulary.origin).engine
        return _EngineEncoder(self.vocab_size, self.eod, engine)

    def __reduce__(self) -> tuple[Callable[[TokenizerSettings], Tokenizer], tuple[TokenizerSettings]]:
        # The unpickling process uses the same engine, and need not compare again.
        return self._reopen, (replace(self._settings, engine=self._choice.name),)

    def _id_of(self, name: str) -> int | None:
        added = self._added.get(name)
        return self._vocabulary.id_of(name) if added is None else added

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return self._vocabulary.size + len(self._added)

    @property
    def specials(self) -> SpecialTokens:
        """Ids of special tokens."""
        return self._specials

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a document; None if the vocabulary has none."""
        return self._specials.eod

    @property
    def sha256(self) -> str:
        """Digest of everything that determines the ids of a text.

        Tokens added after the vocabulary do not.
        """
        return self._vocabulary.sha256

    @property
    def engine(self) -> str:
        """Name of the library that encodes."""
        return self._choice.name

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about faster engines that are not used."""
        return self._choice.notes

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without bos or eod.

        Names of special tokens in it are ordinary text.
        """
        found: list[int] = self.encode_batch([text]).tokens.tolist()
        return found

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return ``encode`` of each text."""
        return self._choice.engine.encode_batch([without_surrogates(text) for text in texts])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, without special tokens.

        Bytes that are not UTF-8 become U+FFFD.
        """
        size = self._vocabulary.size
        return self._vocabulary.decode([token for token in tokens if token < size])

    def word_pieces(self) -> WordPieces:
        """Return flags of the tokens that begin a word; added tokens are words."""
        found = self._vocabulary.word_pieces()
        added = np.ones(len(self._added), np.bool_)
        return WordPieces(np.concatenate((found.begins, added)), np.concatenate((found.ends, added)))


@dataclass(frozen=True)
class _EngineEncoder:
    vocab_size: int
    eod: int | None
    engine: Engine

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return self.engine.encode_batch([without_surrogates(text) for text in texts])


def without_surrogates(text: str) -> str:
    """Return ``text`` as valid UTF-8.

    Surrogates from JSON escapes become their character, or U+FFFD if alone.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
