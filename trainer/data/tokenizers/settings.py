"""Settings of a tokenizer, under Megatron-LM's names."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.sections.data import DataConfig


@dataclass(frozen=True)
class TokenizerSettings:
    """All settings that determine the output of a tokenizer, besides the files' content.

    Attributes:
        tokenizer_type: one of trainer.config.data_flags.TOKENIZER_TYPES; None to recognise the files.
        tokenizer_model: the file, or a folder that holds the files.
        vocab_file: vocab.json of a GPT-2 BPE, or vocab.txt of a WordPiece.
        merge_file: merges.txt of a GPT-2 BPE.
        tokenizer_function: ``module:function`` that returns a tokenizer of the user's own; then all else is unset.
        vocab_size: number of ids of a NullTokenizer, or the maximum number of ids of a TikTokenizer's list.
        vocab_extra_ids: number of <extra_id_i> tokens, added after the vocabulary unless they are in it.
        tokenizer_special_tokens: names of further tokens, added likewise; encoded text never contains them.
        tiktoken_pattern: name of a pattern that splits text into words, or a regular expression; None to take the
            file's pattern.
        tiktoken_num_special_tokens: ids before the first rank of a TikTokenizer's list.
        tokenizer_hf_include_special_tokens: add the tokens of a tokenizer.json's template around a text, and read
            names of special tokens in it as these tokens.
        eod_token: name of the token that ends a document; None to take the file's token.
        engine: name of the library that encodes; None for the fastest installed that agrees with the reference.
    """

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_function: str | None = None
    vocab_size: int | None = None
    vocab_extra_ids: int = 0
    tokenizer_special_tokens: tuple[str, ...] = ()
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tokenizer_hf_include_special_tokens: bool = False
    eod_token: str | None = None
    engine: str | None = None

    @property
    def is_set(self) -> bool:
        """True if a tokenizer is named."""
        return self.has_files or self.tokenizer_function is not None or self.tokenizer_type == "NullTokenizer"

    @property
    def has_files(self) -> bool:
        """True if files are named, unlike for a NullTokenizer."""
        return bool(self.tokenizer_model or self.vocab_file)

    @property
    def name(self) -> str:
        """Name of the tokenizer for messages."""
        return (
            self.tokenizer_model or self.vocab_file or self.tokenizer_function or self.tokenizer_type or "no tokenizer"
        )


def settings_of(data: DataConfig, vocab_size: int | None = None) -> TokenizerSettings:
    """Return the settings of a config's data section; ``vocab_size`` is the model's."""
    return TokenizerSettings(
        tokenizer_type=data.tokenizer_type,
        tokenizer_model=data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        tokenizer_function=data.tokenizer_function,
        vocab_size=vocab_size,
        vocab_extra_ids=data.vocab_extra_ids,
        tokenizer_special_tokens=tuple(data.tokenizer_special_tokens),
        tiktoken_pattern=data.tiktoken_pattern,
        tiktoken_num_special_tokens=data.tiktoken_num_special_tokens,
        tokenizer_hf_include_special_tokens=data.tokenizer_hf_include_special_tokens,
        eod_token=data.eod_token,
    )


def settings_from_flags(options: argparse.Namespace) -> TokenizerSettings:
    """Return the settings of the flags of ``add_tokenizer_flags``."""
    return TokenizerSettings(
        tokenizer_type=options.tokenizer_type,
        tokenizer_model=_text(options.tokenizer_model),
        vocab_file=_text(options.vocab_file),
        merge_file=_text(options.merge_file),
        tokenizer_function=options.tokenizer_function,
        vocab_size=options.vocab_size,
        vocab_extra_ids=options.vocab_extra_ids,
        tokenizer_special_tokens=tuple(options.tokenizer_special_tokens),
        tiktoken_pattern=options.tiktoken_pattern,
        tiktoken_num_special_tokens=options.tiktoken_num_special_tokens,
        tokenizer_hf_include_special_tokens=options.tokenizer_hf_include_special_tokens,
        eod_token=options.eod_token,
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
