"""``python -m trainer evaluate``: loss and perplexity of a checkpoint on a whole split.

Each token counts once.

Legend: B windows, S sequence.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from trainer.checkpoint.directory import CheckpointError
from trainer.commands.serial_model import SerialModel, load_serial_model
from trainer.config.errors import ConfigError
from trainer.config.sections import DataConfig
from trainer.config.tokenizer_keys import TokenizerKeys
from trainer.config.train_config import TrainConfig
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.samples.batches import MicroBatch, Packing
from trainer.data.samples.sources import Source, document_rules, open_blends, single_source
from trainer.data.tokenizers.factory import load_tokenizer
from trainer.data.tokenizers.settings import settings_of
from trainer.data.tokenizers.tokenizer import Tokenizer
from trainer.ops.build.build_settings import BuildSettings
from trainer.pipeline.executor import forward_only

MOST_TOKENS_AT_ONCE = 8192
"""Limits the memory of the logits: 8192 tokens of a vocabulary of 50,000 are 1.6 GB in float32."""
DECODE_TOKENS = 1 << 16


@dataclass(frozen=True)
class Evaluation:
    """Result of a model on a text."""

    tokens: int
    """Number of predicted tokens: all but the first of the split."""
    loss: float
    """Mean loss in nats per token."""
    perplexity: float
    bits_per_byte: float | None
    """Loss per UTF-8 byte of the text, comparable across tokenizers; None without a tokenizer."""


def evaluate(
    serial: SerialModel,
    source: Source,
    tokenizer: Tokenizer | None,
    max_tokens: int | None,
    packing: Packing | None = None,
) -> Evaluation:
    """Loss over the documents of ``source`` in order, cut into windows of ``training.seq_length``.

    Windows are independent: a token at a window's start has little context. The last window may be short.

    Args:
        serial: the model.
        source: the split.
        tokenizer: counts the bytes of the text; None leaves bits_per_byte None.
        max_tokens: evaluate only the first ``max_tokens``.
        packing: rules of the model's training for documents that share a window.

    Raises:
        DataError: the split has fewer than two tokens, or one outside the model's vocabulary.
    """
    start, stop = (source.tokens.first_token(end) for end in (source.sequences.start, source.sequences.stop))
    if max_tokens is not None:
        stop = min(stop, start + max_tokens + 1)
    if stop - start < 2:
        raise DataError(f"{source.key}: the split holds {stop - start} tokens; at least two are needed to predict one")
    loss_sum, count = 0.0, 0
    for batch in _windows(source.tokens, start, stop, serial):
        if packing is not None:
            batch = packing.apply(batch)
        loss_sum += float(forward_only(serial.model, [batch.to(serial.device)]))
        count += batch.valid_tokens
    loss = loss_sum / count
    text_bytes = _text_bytes(source.tokens, start + 1, stop, tokenizer) if tokenizer else 0
    bits_per_byte = loss_sum / math.log(2) / text_bytes if text_bytes else None
    return Evaluation(count, loss, math.exp(min(loss, 700.0)), bits_per_byte)


def _windows(tokens: IndexedDataset, start: int, stop: int, serial: SerialModel) -> Iterator[MicroBatch]:
    length = serial.config.training.seq_length
    rows = max(1, MOST_TOKENS_AT_ONCE // length)
    vocab_size = serial.vocab_size
    for first in range(start, stop - 1, rows * length):
        text = tokens.read(first, min(stop, first + rows * length + 1)).astype(np.int64)
        if text.max() >= vocab_size or text.min() < 0:
            raise DataError(
                f"{tokens.prefix}: holds token {text.max()}, but the model's vocabulary has {vocab_size} tokens"
            )
        predicted = len(text) - 1
        padded = np.zeros(-(-predicted // length) * length + 1, np.int64)
        padded[: len(text)] = text
        valid = np.arange(len(padded) - 1) < predicted
        inputs, labels, mask = (
            torch.from_numpy(part).view(-1, length) for part in (padded[:-1].copy(), padded[1:].copy(), valid)
        )  # [B, S]
        yield MicroBatch(inputs, labels, None if predicted == len(valid) else mask.float())


def _text_bytes(tokens: IndexedDataset, start: int, stop: int, tokenizer: Tokenizer) -> int:
    # Decoded in blocks: a character cut by a block's border becomes U+FFFD, 3 bytes, on either side, which is
    # negligible in 65,536 tokens.
    blocks = (tokens.read(first, min(stop, first + DECODE_TOKENS)) for first in range(start, stop, DECODE_TOKENS))
    return sum(len(tokenizer.decode(block.tolist()).encode()) for block in blocks)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command; returns 3 if checkpoint, tokenizer or data cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        _evaluate(options, BuildSettings.from_variables(environment))
    except (CheckpointError, ConfigError, DataError) as error:
        print(f"trainer evaluate: {error}", file=sys.stderr)
        return 3
    return 0


def _evaluate(options: argparse.Namespace, settings: BuildSettings) -> None:
    serial = load_serial_model(options.checkpoint, settings=settings)
    for note in serial.notes:
        print(f"trainer evaluate: {note}", file=sys.stderr)
    config = _with_data(serial.config, options)
    blends = open_blends(config)
    if options.split not in blends:
        raise DataError(f"--split: the data has no {options.split} split, only {', '.join(blends)}")
    source = single_source(blends[options.split])
    named = settings_of(config.data).has_files
    tokenizer = load_tokenizer(config.data, config.model.vocab_size) if named else None
    rules = document_rules(config, [source])
    found = evaluate(serial, source, tokenizer, options.max_tokens, rules)
    if options.json:
        print(json.dumps({"checkpoint": str(serial.checkpoint), "iteration": serial.iteration, **asdict(found)}))
        return
    per_byte = f", {found.bits_per_byte:.4f} bits per byte" if found.bits_per_byte is not None else ""
    print(
        f"{serial.checkpoint.name} on {options.split}, {found.tokens:,} tokens: loss {found.loss:.4f} nats per token, "
        f"perplexity {found.perplexity:.2f}{per_byte}"
    )


def _with_data(config: TrainConfig, options: argparse.Namespace) -> TrainConfig:
    # Every token of the text counts, including ends of documents.
    data = config.data.model_dump() | {"eod_mask_loss": False}
    if options.data_path is not None:
        data |= {"data_path": [options.data_path], "train_data_path": [], "valid_data_path": [], "mock_data": False}
        data["streaming"] = False
    if options.data_split is not None:
        data["split"] = options.data_split
    if options.tokenizer is not None:
        data |= TokenizerKeys(tokenizer_model=str(options.tokenizer)).model_dump()
    if data["mock_data"]:
        raise DataError("--data-path: the run used mock data; name the prefix of an indexed dataset")
    return config.model_copy(update={"data": DataConfig(**data)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer evaluate",
        description="Loss and perplexity on a split of the run's own data, or of --data-path.",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder iter_*, the folder that contains it, or a run directory",
    )
    parser.add_argument("--split", choices=["train", "valid", "test"], default="valid")
    parser.add_argument("--data-path", metavar="PREFIX", help="an indexed dataset (.bin and .idx); default: the run's")
    parser.add_argument("--data-split", metavar="SHARES", help="shares of train, valid, test; default: the run's")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="for bits per byte; default: the run's")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="evaluate only the first N tokens")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1; give 1 or more")
    return value
