"""Keys of the data section that say which tokenizer there is, under Megatron-LM's names. Torch-free."""

# Annotations are evaluated here on purpose, as in config_sections.
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, field_validator

from trainer.config.megatron_flags import NOT_OF_TEXT, NOT_OF_TEXT_SAID, TokenizerType


class TokenizerKeys(BaseModel):
    """Which files the tokenizer is read from; trainer.data.tokenizers reads them."""

    model_config = ConfigDict(defer_build=True)

    tokenizer_type: TokenizerType | None = None
    """Unset: told from the files."""
    tokenizer_model: str | None = None
    """A tokenizer.json, SentencePiece .model or .tiktoken file, or a folder that holds a tokenizer's files. Not needed
    where the data's manifest or vocab_size tells all."""
    vocab_file: str | None = None
    """GPT-2's vocab.json or BERT's vocab.txt."""
    merge_file: str | None = None
    """GPT-2's merges.txt."""
    vocab_extra_ids: NonNegativeInt = 0
    """T5: number of <extra_id_i>, added after the vocabulary where it does not have them."""
    tokenizer_special_tokens: list[str] = []
    """Further tokens, added likewise; no text becomes one of them."""
    tiktoken_pattern: str | None = None
    """r50k, p50k, cl100k, o200k, Megatron-LM's v1 and v2, or a regular expression. Unset: told from the file."""
    tiktoken_num_special_tokens: NonNegativeInt = 1000
    """Ids before the first rank of a list of ranks in JSON."""
    tokenizer_hf_include_special_tokens: bool = False
    """Add what a tokenizer.json puts around a text, and read names of special tokens in it as those tokens, as
    Megatron-LM does unless told not to. Off: text is only text."""
    eod_token: str | None = None
    """Name of the token that ends a document. Unset: told from the files, or by the names in use."""

    @field_validator("tokenizer_type", mode="before")
    @classmethod
    def _check_tokenizer_type(cls, value: Any) -> Any:
        if value in NOT_OF_TEXT:
            raise ValueError(NOT_OF_TEXT_SAID)
        return value
