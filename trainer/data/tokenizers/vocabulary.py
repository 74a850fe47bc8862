"""A vocabulary of any kind, with the engine that encodes for it, as a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from trainer.data.errors import DataError
from trainer.data.tokenizers.engines import Choice, Engine, EngineOffer, choose_engine
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
        """Digest, in hexadecimal, of all that decides which ids a text becomes."""

    @property
    def named(self) -> Mapping[str, int]:
        """Ids of special tokens by their names."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Meaning (as in SpecialTokens) -> id, where the vocabulary itself says it."""

    @property
    def special_names(self) -> Mapping[str, str]:
        """Meaning -> name of a token, where files beside the vocabulary say it."""

    def id_of(self, name: str) -> int | None:
        """Id of any token by its name; None: there is none."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, all below ``size``, without special tokens."""

    def word_pieces(self) -> WordPieces:
        """Which of the ``size`` tokens begin a word."""

    def engines(self) -> Sequence[EngineOffer]:
        """What can encode, the fastest first, the reference last."""


class VocabularyTokenizer:
    """A vocabulary and the tokens added after it. Its engine is chosen when it is first asked for.

    Args:
        vocabulary: what the files hold.
        settings: what they were opened with.
        reopen: opens them again, in the process that unpickles this.

    Raises:
        DataError: there is no token to end a document of the name that is asked for; later, no engine is installed or
            can load the vocabulary.
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
        # Who only wants ids or the fingerprint, as every rank of a training run, loads no library.
        return choose_engine(self._vocabulary.engines(), self._settings.engine, self._vocabulary.origin)

    def encoder(self) -> Encoder:
        """What encodes, alone: who lets go of this object is rid of the vocabulary, which takes 27 MB for GPT-2's."""
        offers = [*self._vocabulary.engines()]
        reference, settings, reopen, sha256 = offers[-1].name, self._settings, self._reopen, self.sha256

        def open_reference() -> Engine:
            opened = reopen(replace(settings, engine=reference))
            if opened.sha256 != sha256:
                raise DataError(
                    f"{settings.name}: the tokenizer was changed while it was used (its sha256 was {sha256[:12]}, and "
                    f"is {opened.sha256[:12]}); put back the first, or begin anew with --restart"
                )
            return opened

        wanted = settings.engine or self.engine
        if wanted != reference:
            offers[-1] = EngineOffer(reference, open_reference)
        engine = choose_engine(offers, wanted, self._vocabulary.origin).engine
        return _EngineEncoder(self.vocab_size, self.eod, engine)

    def __reduce__(self) -> tuple[Callable[[TokenizerSettings], Tokenizer], tuple[TokenizerSettings]]:
        # The other side need not choose again.
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
        """Ids with a meaning of their own."""
        return self._specials

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a document; None if the vocabulary has none."""
        return self._specials.eod

    @property
    def sha256(self) -> str:
        """Digest of what decides which ids a text becomes; tokens added after the vocabulary do not."""
        return self._vocabulary.sha256

    @property
    def engine(self) -> str:
        """Name of the library that encodes."""
        return self._choice.name

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about faster engines that are not there."""
        return self._choice.notes

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without beginning or end tokens; names of special tokens in it are ordinary text."""
        found: list[int] = self.encode_batch([text]).tokens.tolist()
        return found

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """``encode`` of each text."""
        return self._choice.engine.encode_batch([sayable(text) for text in texts])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        size = self._vocabulary.size
        return self._vocabulary.decode([token for token in tokens if token < size])

    def word_pieces(self) -> WordPieces:
        """Which tokens begin a word; added ones are words of their own."""
        found = self._vocabulary.word_pieces()
        own = np.ones(len(self._added), np.bool_)
        return WordPieces(np.concatenate((found.begins, own)), np.concatenate((found.ends, own)))


@dataclass(frozen=True)
class _EngineEncoder:
    vocab_size: int
    eod: int | None
    engine: Engine

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return self.engine.encode_batch([sayable(text) for text in texts])


def sayable(text: str) -> str:
    """``text`` as UTF-8 can say it: surrogates, which JSON's escapes may leave, become their character or U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
