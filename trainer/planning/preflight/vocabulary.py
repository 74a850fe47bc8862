"""The tokenizer of a config against its data and its tables, as trainer.data.samples.sources.vocabulary judges it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.preflight.datasets import Dataset
from trainer.planning.preflight.tokenizer_file import TokenizerError, Tokens, named_size, named_tokens

if TYPE_CHECKING:
    from trainer.planning.start_model import Files


def tokenizer_problems(config: TrainConfig, datasets: Sequence[Dataset], files: Files) -> Iterator[ConfigError]:
    """A tokenizer that cannot be read, that is not the data's, or whose tokens exceed the model's tables.

    Args:
        config: of the run.
        datasets: of the config; those with a problem of their own are left out.
        files: of the machine that has the tokenizer.
    """
    data = config.data
    key = "data.tokenizer_model" if data.tokenizer_model else "data.vocab_file"
    try:
        tokens, size = named_tokens(data, files), named_size(data, files)
    except TokenizerError as error:
        yield ConfigError(key, str(error))
        return
    if config.model.architecture != "decoder":
        yield from _lacks_of_masked(config, key, tokens, files)
    sound = [dataset for dataset in datasets if not dataset.problem]
    if tokens is not None and tokens.is_whole:
        for dataset in sound:
            if dataset.vocab_size not in (None, tokens.size, size):
                yield ConfigError(
                    key,
                    f"{tokens.file} has {tokens.size:,} tokens, but {dataset.prefix} was tokenized with "
                    f"another tokenizer, of {dataset.vocab_size:,} tokens; name the data's tokenizer, or prepare the "
                    "data again",
                )
                return
    yield from _too_small(config, [*(dataset.vocab_size for dataset in sound), size])


def _lacks_of_masked(config: TrainConfig, key: str, tokens: Tokens | None, files: Files) -> Iterator[ConfigError]:
    """A vocabulary of words of unknown case, and a T5 without sentinels."""
    data = config.data
    path = str(data.tokenizer_model or data.vocab_file)
    if data.tokenizer_type is None and tokens is not None and path.endswith(".txt"):
        beside = f"{path.rpartition('/')[0] or '.'}/tokenizer_config.json"
        if b'"do_lower_case"' not in (files.read(beside) or b""):
            yield ConfigError(
                key,
                f"{path}: its folder has no tokenizer_config.json with do_lower_case; set data.tokenizer_type to "
                "BertWordPieceLowerCase, Megatron-LM's default for BERT and T5, or BertWordPieceCase",
            )
    if config.model.architecture != "t5" or data.vocab_extra_ids or data.mock_data or tokens is None:
        return
    if tokens.names and "<extra_id_0>" not in tokens.names:
        yield ConfigError(
            "data.vocab_extra_ids",
            f"is 0, but {tokens.file} has no sentinels (<extra_id_0>, ...), which mark the masked spans of T5; use 100",
        )


def _too_small(config: TrainConfig, sizes: Sequence[int | None]) -> Iterator[ConfigError]:
    """The model's tables, if a tokenizer has more tokens than they have rows."""
    rows, largest = config.model.vocab_size, max((size for size in sizes if size is not None), default=0)
    # A NullTokenizer's vocab_size leaves out the token that ends documents.
    if rows is None or rows >= largest or config.data.tokenizer_type == "NullTokenizer":
        return
    if config.checkpoint.load is not None and not config.continues_save:
        yield ConfigError(
            "model.vocab_size",
            f"the tables of {config.checkpoint.load} have {rows:,} rows; the tokenizer of the data has {largest:,} "
            "tokens; prepare the data with the model's own tokenizer",
        )
    else:
        yield ConfigError(
            "model.vocab_size",
            f"{rows} is too small for the tokenizer of the data; use {largest}, or leave it unset",
        )
