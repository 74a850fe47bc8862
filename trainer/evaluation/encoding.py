"""Texts as tokens, as the harness's own models of transformers make them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.data.tokenizers.factory import open_tokenizer
from trainer.evaluation.errors import EvaluationError

if TYPE_CHECKING:
    from trainer.data.tokenizers.settings import TokenizerSettings
    from trainer.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoding:
    """Tokenizers and special tokens.

    Attributes:
        around: adds the tokens that a tokenizer.json puts around a text; for all other kinds the same as ``bare``.
        bare: adds none.
        stop_tokens: ids that end a continuation.
    """

    around: Tokenizer
    bare: Tokenizer
    stop_tokens: frozenset[int]

    @classmethod
    def open(cls, settings: TokenizerSettings, stop_tokens: frozenset[int]) -> Encoding:
        """Read the files that ``settings`` name.

        Raises:
            DataError: a file cannot be read.
            EvaluationError: no token begins or ends a text.
        """
        bare = open_tokenizer(replace(settings, tokenizer_hf_include_special_tokens=False))
        around = open_tokenizer(replace(settings, tokenizer_hf_include_special_tokens=True))
        found = cls(around, bare, stop_tokens | ({bare.eod} if bare.eod is not None else set()))
        if found.first_token is None:
            raise EvaluationError(
                f"{settings.name}: has no token that begins a text or ends a document, before which a text could be "
                "scored; name its eos_token in tokenizer_config.json"
            )
        return found

    @property
    def first_token(self) -> int | None:
        """Token before a text without context."""
        return self.bare.specials.bos if self.bare.specials.bos is not None else self.bare.eod
