"""Loss and perplexity of a model on a whole split. Each token counts once.

Legend: B windows, S sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.data.errors import DataError
from trainer.data.samples.micro_batch import MicroBatch
from trainer.pipeline.executor import forward_only

if TYPE_CHECKING:
    from trainer.data.indexed.indexed_dataset import IndexedDataset
    from trainer.data.samples.batches import Packing
    from trainer.data.samples.sources import Source
    from trainer.data.tokenizers.tokenizer import Tokenizer
    from trainer.generation.model import GenerationModel

MAX_TOKENS_AT_ONCE = 8192
"""Limits the memory of the logits: 8192 tokens of a vocabulary of 50,000 are 1.6 GB in float32."""
DECODE_TOKENS = 1 << 16


@dataclass(frozen=True)
class TextEvaluation:
    """Result of a model on a text."""

    tokens: int
    """Number of predicted tokens: all but the first of the split."""
    loss: float
    """Mean loss in nats per token."""
    perplexity: float
    bits_per_byte: float | None
    """Loss per UTF-8 byte of the text, comparable across tokenizers; None without a tokenizer."""


def split_tokens(source: Source) -> tuple[int, int]:
    """First token of a split, and the first one after it."""
    return source.tokens.first_token(source.sequences.start), source.tokens.first_token(source.sequences.stop)


def evaluate_text(
    model: GenerationModel,
    source: Source,
    tokenizer: Tokenizer | None,
    max_tokens: int | None,
    packing: Packing | None = None,
) -> TextEvaluation:
    """Loss over the documents of ``source`` in order, cut into windows of ``training.seq_length``.

    Collective: all ranks of the job, with the same arguments; the result is the same on all.

    Windows are independent: a token at a window's start has little context. The last window may be short.

    Args:
        model: the model.
        source: the split, of two tokens at least.
        tokenizer: counts the bytes of the text; None leaves bits_per_byte None.
        max_tokens: evaluate only the first ``max_tokens``.
        packing: rules of the model's training for documents that share a window.

    Raises:
        DataError: a token is outside the model's vocabulary.
    """
    start, stop = split_tokens(source)
    if max_tokens is not None:
        stop = min(stop, start + max_tokens + 1)
    loss_sum, count = 0.0, 0
    for batch in _windows(source.tokens, start, stop, model):
        if packing is not None:
            batch = packing.apply(batch)
        own = forward_only(model.model, [batch.to(model.device)])
        loss_sum += float(model.from_last_stage(own))
        count += batch.valid_tokens
    loss = loss_sum / count
    text_bytes = _text_bytes(source.tokens, start + 1, stop, tokenizer) if tokenizer else 0
    bits_per_byte = loss_sum / math.log(2) / text_bytes if text_bytes else None
    return TextEvaluation(count, loss, math.exp(min(loss, 700.0)), bits_per_byte)


def _windows(tokens: IndexedDataset, start: int, stop: int, model: GenerationModel) -> Iterator[MicroBatch]:
    length = model.config.training.seq_length
    rows = max(1, MAX_TOKENS_AT_ONCE // length)
    vocab_size = model.vocab_size
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
