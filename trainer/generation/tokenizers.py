"""Tokenizer, stop tokens and prompts of a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.errors import DataError
from trainer.data.tokenizers.factory import load_tokenizer, open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings, settings_of

if TYPE_CHECKING:
    from trainer.data.tokenizers.tokenizer import Tokenizer
    from trainer.generation.source import ModelSource


def tokenizer_of(source: ModelSource, named: Path | None = None) -> Tokenizer:
    """The tokenizer ``named``, else that of the model.

    A model from a Hugging Face folder, if no run has trained it since, gets prompts with the tokens that its
    tokenizer.json puts around a text, such as the one that begins it.

    Raises:
        DataError: there is no tokenizer, it cannot be read, or it has more tokens than the model.
    """
    if named is not None:
        tokenizer = open_tokenizer(TokenizerSettings(tokenizer_model=str(named)))
    elif source.hub_folder is not None and source.iteration == 0:
        settings = TokenizerSettings(tokenizer_model=str(source.hub_folder))
        if (source.hub_folder / "tokenizer.json").is_file():
            settings = replace(settings, tokenizer_hf_include_special_tokens=True)
        tokenizer = open_tokenizer(settings)
    else:
        settings = settings_of(source.config.data, source.config.model.vocab_size)
        if not settings.is_set:
            raise DataError(f"{source.path}: its run had no tokenizer; name one with --tokenizer")
        tokenizer = load_tokenizer(source.config.data, source.config.model.vocab_size)
    if tokenizer.vocab_size > source.vocab_size:
        raise DataError(
            f"--tokenizer: has {tokenizer.vocab_size} tokens, but the model {source.vocab_size}; name the tokenizer of "
            "the model's training"
        )
    return tokenizer


def stop_tokens_of(source: ModelSource, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a text of this model.

    The token that ended documents in its training; else those that the files of its Hugging Face folder name; else the
    tokenizer's end of a document.
    """
    if source.end_of_documents is not None:
        return frozenset({source.end_of_documents})
    folder = source.hub_folder
    names = ("generation_config.json", "config.json")
    for file in [folder / name for name in names] if folder is not None else []:
        found = _read(file).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if all(isinstance(token, int) for token in ids):
            return frozenset(ids)
    return frozenset() if tokenizer.eod is None else frozenset({tokenizer.eod})


def encode_prompts(prompts: Sequence[str], tokenizer: Tokenizer, source: ModelSource) -> list[list[int]]:
    """Tokens of each prompt; an empty one becomes the token that begins a text, or ends the one before it.

    Raises:
        DataError: a prompt is empty, and there is no such token.
    """
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    choices = (source.end_of_documents, tokenizer.specials.bos, tokenizer.eod)
    begin = next((token for token in choices if token is not None), None)
    for tokens in encoded:
        if not tokens:
            if begin is None:
                raise DataError(
                    "--prompt: is empty, and the tokenizer has no token that begins a text or ends a document; give a "
                    "text"
                )
            tokens.append(begin)
    return encoded


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
