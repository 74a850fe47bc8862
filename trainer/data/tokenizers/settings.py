"""What a tokenizer is opened from, under Megatron-LM's names."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.sections import DataConfig


@dataclass(frozen=True)
class TokenizerSettings:
    """All that decides how a tokenizer works, except the files' content.

    Attributes:
        tokenizer_type: one of trainer.config.data_flags.TOKENIZER_TYPES; None: told from the files.
        tokenizer_model: the file, or a folder that holds the files.
        vocab_file: vocab.json of a GPT-2 BPE, or vocab.txt of a WordPiece.
        merge_file: merges.txt of a GPT-2 BPE.
        vocab_size: how many numbers a NullTokenizer takes, or how many ids a TikTokenizer's list is cut to.
        vocab_extra_ids: number of <extra_id_i>, added after the vocabulary where it does not have them.
        tokenizer_special_tokens: further names, added likewise; text never becomes one of them.
        tiktoken_pattern: name of a way to cut text into words, or a regular expression that does it; None: told from
            the file.
        tiktoken_num_special_tokens: ids before the first rank of a TikTokenizer's list.
        tokenizer_hf_include_special_tokens: add what a tokenizer.json puts around a text, and read names of special
            tokens in it as those tokens.
        eod_token: name of the token that ends a document; None: told from the files.
        engine: name of the library that encodes; None: the fastest that is installed and agrees with the reference.
    """

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
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
        """Whether a tokenizer is named at all."""
        return self.has_files or self.tokenizer_type == "NullTokenizer"

    @property
    def has_files(self) -> bool:
        """Whether files are named, and not only numbers."""
        return bool(self.tokenizer_model or self.vocab_file)

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return self.tokenizer_model or self.vocab_file or self.tokenizer_type or "no tokenizer"


def settings_of(data: DataConfig, vocab_size: int | None = None) -> TokenizerSettings:
    """The settings that a config's data section asks for; ``vocab_size`` is the model's."""
    return TokenizerSettings(
        tokenizer_type=data.tokenizer_type,
        tokenizer_model=data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        vocab_size=vocab_size,
        vocab_extra_ids=data.vocab_extra_ids,
        tokenizer_special_tokens=tuple(data.tokenizer_special_tokens),
        tiktoken_pattern=data.tiktoken_pattern,
        tiktoken_num_special_tokens=data.tiktoken_num_special_tokens,
        tokenizer_hf_include_special_tokens=data.tokenizer_hf_include_special_tokens,
        eod_token=data.eod_token,
    )


def settings_from_flags(options: argparse.Namespace) -> TokenizerSettings:
    """What the flags of ``add_tokenizer_flags`` say."""
    return TokenizerSettings(
        tokenizer_type=options.tokenizer_type,
        tokenizer_model=_text(options.tokenizer_model),
        vocab_file=_text(options.vocab_file),
        merge_file=_text(options.merge_file),
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
