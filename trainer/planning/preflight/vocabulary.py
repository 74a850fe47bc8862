"""The tokenizer of a config against its data and its tables, as trainer.data.samples.sources.vocabulary judges it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.preflight.datasets import Dataset
from trainer.planning.preflight.tokenizer_file import TokenizerError, named_size, named_tokens

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


def _too_small(config: TrainConfig, sizes: Sequence[int | None]) -> Iterator[ConfigError]:
    """The model's tables, if a tokenizer has more tokens than they have rows."""
    rows, largest = config.model.vocab_size, max((size for size in sizes if size is not None), default=0)
    # A NullTokenizer's vocab_size leaves out the token that ends documents.
    if rows is None or rows >= largest or config.data.tokenizer_type == "NullTokenizer":
        return
    if config.checkpoint.load is not None:
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
