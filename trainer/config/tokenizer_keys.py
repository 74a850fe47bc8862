"""Tokenizer keys of the data section, under Megatron-LM's names. Torch-free."""

# No "from __future__ import annotations" here, for the reason given in sections/__init__.py.
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, field_validator

from trainer.config.megatron_flags import NOT_OF_TEXT, NOT_OF_TEXT_MESSAGE, TokenizerType
from trainer.config.sections.functions import check_functions


class TokenizerKeys(BaseModel):
    """Kind and files of the tokenizer, which trainer.data.tokenizers opens."""

    model_config = ConfigDict(defer_build=True)

    tokenizer_type: TokenizerType | None = None
    """Unset: inferred from the files."""
    tokenizer_model: str | None = None
    """A tokenizer.json, SentencePiece .model, .tiktoken or GGUF file, or a folder with a tokenizer's files. Not needed
    if the data's manifest or vocab_size gives the vocabulary size and the end-of-document token."""
    vocab_file: str | None = None
    """GPT-2's vocab.json or BERT's vocab.txt."""
    merge_file: str | None = None
    """GPT-2's merges.txt."""
    tokenizer_function: str | None = None
    """A tokenizer of your own, instead of files: ``module:function``, see docs/guide/hooks.md."""
    vocab_extra_ids: NonNegativeInt = 0
    """T5: number of <extra_id_i> tokens, appended to the vocabulary if it lacks them."""
    tokenizer_special_tokens: list[str] = []
    """Further special tokens, appended in the same way. Text is never encoded as one of them."""
    tiktoken_pattern: str | None = None
    """r50k, p50k, cl100k, o200k, Megatron-LM's v1 and v2, or a regular expression. Unset: inferred from the file."""
    tiktoken_num_special_tokens: NonNegativeInt = 1000
    """Ids reserved before the first rank of a JSON vocabulary."""
    tokenizer_hf_include_special_tokens: bool = False
    """Of a tokenizer.json, or vocab.json with merges.txt: add the special tokens that it puts around a text, and encode
    the names of special tokens in the text as these tokens; Megatron-LM's default. Off: text never becomes a special
    token."""
    eod_token: str | None = None
    """Name of the token that ends a document. Unset: taken from the files, else the usual name in the vocabulary."""

    @field_validator("tokenizer_function")
    @classmethod
    def _check_tokenizer_function(cls, value: Any) -> Any:
        return check_functions(value)

    @field_validator("tokenizer_type", mode="before")
    @classmethod
    def _check_tokenizer_type(cls, value: Any) -> Any:
        # llm-jp/Megatron-LM: the folder of tokenizer_model, read by transformers. Documents there begin with BOS, which
        # belongs to the data.
        if value == "Llama3Tokenizer":
            return "HuggingFaceTokenizer"
        if value in NOT_OF_TEXT:
            raise ValueError(NOT_OF_TEXT_MESSAGE)
        return value
