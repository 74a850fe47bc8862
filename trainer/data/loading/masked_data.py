"""Data of masked language models: samples of BERT or T5, joined to micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from trainer.config.train_config import TrainConfig
from trainer.data.errors import DataError
from trainer.data.masked.bert_batches import join_bert
from trainer.data.masked.bert_dataset import BertDataset
from trainer.data.masked.masking import MaskingRules
from trainer.data.masked.mock import MockBertSamples, MockT5Samples
from trainer.data.masked.t5_batches import join_t5
from trainer.data.masked.t5_dataset import T5Dataset
from trainer.data.samples.batches import BatchShape, Split, TrainData
from trainer.data.samples.blend import BlendedDataset, BlendOrder, normalized
from trainer.data.samples.micro_batch import MicroBatch
from trainer.data.samples.mock import DEFAULT_VOCAB_SIZE, MOCK_NOTE
from trainer.data.samples.sources import SPLITS, Source, open_data, vocabulary
from trainer.data.tokenizers.tokenizer import Tokenizer

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class MaskedSamples(Protocol[S_co]):
    """An endless sequence of samples, such as a BertDataset."""

    def sample(self, number: int) -> S_co:
        """Build sample ``number``."""


class SizedSamples(MaskedSamples[S_co], Sized, Protocol[S_co]):
    """Samples with a number per epoch."""


class MaskedData(TrainData, Generic[S]):
    """Samples of a run by split, each with its own labels, loss mask and padding.

    Every rank of a replica reads the batches: all pipeline stages need the padding.
    """

    def __init__(
        self,
        samples: Mapping[Split, MaskedSamples[S]],
        vocab_size: int,
        shape: BatchShape,
        join: Callable[[Sequence[S], int], MicroBatch],
        notes: tuple[str, ...] = (),
    ) -> None:
        """Wrap ``samples``.

        Args:
            samples: samples of each existing split.
            vocab_size: number of token ids, without padding.
            shape: batch sizes and this replica's place.
            join: builds a micro-batch from its samples and its number within the global batch.
            notes: lines for the log, which rank 0 prints.
        """
        super().__init__({}, vocab_size, shape, notes=notes, masks_loss=True)
        self._masked = dict(samples)
        self._join = join

    def has(self, split: Split) -> bool:
        """See TrainData."""
        return split in self._masked

    def micro_batches(self, split: Split, consumed_samples: int) -> list[MicroBatch]:
        """See TrainData."""
        size, samples = self._shape.micro_batch_size, self._masked[split]
        return [
            self._join([samples.sample(consumed_samples + index * size + place) for place in range(size)], index)
            for index in self._indexes(split, consumed_samples)
        ]


def build_masked_data(
    config: TrainConfig, shape: BatchShape, num_samples: Mapping[Split, int], run_dir: Path | None
) -> TrainData:
    """Open the data of a masked language model. All ranks call it; it needs no communication.

    Args:
        config: the run's config.
        shape: batch sizes and this replica's place.
        num_samples: samples of each split in the run, for Megatron-LM's order.
        run_dir: parent of the cache if the data's folder is read-only; None: no cache then.

    Raises:
        DataError: the data cannot be used, or its tokenizer is not named.
    """
    join: Callable[[Sequence[Any], int], MicroBatch] = join_t5
    if not config.model.is_encoder_decoder:
        join = partial(join_bert, has_order=config.model.bert_binary_head)
    if config.data.mock_data:
        return _mock(config, shape, join)
    opened = open_data(config, run_dir)
    blends, tokenizer = opened.blends, opened.tokenizer
    if tokenizer is None:
        raise DataError(
            "data.tokenizer_model: is unset, but masking needs the tokenizer of the data; name it, or data.vocab_file"
        )
    vocab_size = vocabulary(config, opened.sources, tokenizer)
    samples: dict[Split, MaskedSamples[Any]] = {}
    notes = []
    for split, sources in blends.items():
        requested = num_samples[split] if config.data.sample_order == "megatron" else None
        try:
            datasets = [_samples_of(config, source, tokenizer, requested) for source in sources]
            samples[split] = _blended(config, sources, datasets)
        except DataError as error:
            if split == "train":
                raise
            notes.append(f"no samples of the {split} split: {error}")
    if config.training.eval_iters and "valid" not in blends:
        notes.append("no evaluation during training: there is no valid split")
    return MaskedData(samples, vocab_size, shape, join, tuple(notes))


def _mock(config: TrainConfig, shape: BatchShape, join: Callable[[Sequence[Any], int], MicroBatch]) -> TrainData:
    vocab_size, training = config.model.vocab_size or DEFAULT_VOCAB_SIZE, config.training
    share, has_parts = config.data.mask_prob, config.model.bert_binary_head
    samples: dict[Split, MaskedSamples[Any]] = {}
    for number, split in enumerate(SPLITS):
        if config.model.is_encoder_decoder:
            lengths = (training.seq_length, training.decoder_seq_length)
            samples[split] = MockT5Samples(vocab_size, lengths, training.seed, number, mask_prob=share)
        else:
            samples[split] = MockBertSamples(
                vocab_size, training.seq_length, training.seed, number, mask_prob=share, has_parts=has_parts
            )
    return MaskedData(samples, vocab_size, shape, join, notes=(MOCK_NOTE,))


def _samples_of(
    config: TrainConfig, source: Source, tokenizer: Tokenizer, num_samples: int | None
) -> SizedSamples[Any]:
    training, data, tokens = config.training, config.data, source.tokens
    documents, length, seed, short = _documents(source), training.seq_length, training.seed, data.short_seq_prob
    cache = source.cache
    try:
        if config.model.is_encoder_decoder:
            lengths = (length, training.decoder_seq_length)
            # Megatron-LM's spans of T5: up to ten words, in a geometric number (pretrain_t5.py).
            rules = MaskingRules(data.mask_prob, 10, masking_use_geometric_distribution=True)
            return T5Dataset(tokens, documents, *lengths, seed, tokenizer, rules, short, num_samples, cache)
        rules, has_order = MaskingRules(data.mask_prob), config.model.bert_binary_head
        return BertDataset(tokens, documents, length, seed, tokenizer, rules, short, has_order, num_samples, cache)
    except DataError as error:
        raise DataError(f"{source.key}: {error}") from None


def _documents(source: Source) -> range:
    """The documents of the source's sequences, which are sentences."""
    bounds = (source.sequences.start, source.sequences.stop)
    first, stop = (int(place) for place in source.tokens.document_indices.searchsorted(bounds))
    return range(first, stop)


def _blended(config: TrainConfig, sources: Sequence[Source], opened: Sequence[SizedSamples[S]]) -> MaskedSamples[S]:
    """The samples of one dataset, or of several in the order of their weights or sizes."""
    if len(opened) == 1:
        return opened[0]
    if config.data.sample_order == "megatron":
        raise DataError(
            f"{sources[0].key}: names {len(sources)} datasets, but masked samples of several have no Megatron-LM order "
            "here; set data.sample_order to stable"
        )
    given = [source.weight for source in sources if source.weight is not None]
    shares = normalized(given or [float(len(one)) for one in opened])
    return BlendedDataset(opened, BlendOrder(shares, sources[0].cache))
