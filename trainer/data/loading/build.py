"""Builds and checks the data of a run before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.sections.batch_sizes import BatchSizes
from trainer.config.sections.training import TrainingConfig
from trainer.config.train_config import TrainConfig
from trainer.data.errors import DataError
from trainer.data.loading.loader import DEPTH
from trainer.data.loading.masked_data import build_masked_data
from trainer.data.loading.memory_limits import memory_limit
from trainer.data.loading.user_data import build_user_data
from trainer.data.samples.batches import BatchShape, Sample, Samples, Split, TrainData
from trainer.data.samples.blend import BlendedDataset, BlendOrder, normalized
from trainer.data.samples.continuation import ContinuedDatasets, DatasetRecord
from trainer.data.samples.gpt_dataset import GPTDataset
from trainer.data.samples.index_cache import EpochIndexCache
from trainer.data.samples.mock import DEFAULT_VOCAB_SIZE, MOCK_NOTE, MockDataset
from trainer.data.samples.sample_packing import PackedDataset
from trainer.data.samples.sources import SPLITS, OpenData, Source, document_rules, open_data, vocabulary
from trainer.data.streaming.stream import open_stream

SURPLUS = 0.005
"""Surplus of each dataset of a blend over its share in Megatron-LM (mid_level_dataset_surplus)."""
MAX_NAMED = 3
"""Largest number of datasets named in a note."""

Dataset = GPTDataset | PackedDataset
Part = tuple[Source, Dataset]


def build_data(config: TrainConfig, dp_rank: int, dp: int, run_dir: Path | None = None) -> TrainData:
    """Open the data of ``config.data``. All ranks call it; it needs no communication.

    Args:
        config: the run's config.
        dp_rank: this rank's coordinate on the data-parallel axis.
        dp: number of replicas.
        run_dir: parent of the index cache if the data's folder is read-only; None: no cache then.

    Raises:
        DataError: files are missing or damaged, their tokens do not fit the model, or there are too few tokens.
    """
    training, sizes = config.training, config.batch_sizes(dp)
    shape = BatchShape(training.micro_batch_size, sizes.full, training.seq_length, dp, dp_rank, sizes)
    requested = {split: samples_of_run(training, split, sizes) for split in SPLITS}
    if config.model.architecture != "decoder":
        return build_masked_data(config, shape, requested, run_dir)
    if config.hooks.dataset_function is not None:
        return build_user_data(config, config.hooks.dataset_function, shape)
    if config.data.mock_data:
        document_rules(config, (), None)
        vocab_size = config.model.vocab_size or DEFAULT_VOCAB_SIZE
        return TrainData(
            {
                split: MockDataset(vocab_size, training.seq_length, training.seed, number)
                for number, split in enumerate(SPLITS)
            },
            vocab_size,
            shape,
            notes=(MOCK_NOTE,),
        )
    if config.data.streaming:
        return _streamed(config, shape)
    return _prepared(config, shape, open_data(config, run_dir), requested)


def _prepared(config: TrainConfig, shape: BatchShape, opened: OpenData, num_samples: Mapping[Split, int]) -> TrainData:
    sources, training, packs = opened.sources, config.training, config.data.sample_packing
    vocab_size = vocabulary(config, sources, opened.tokenizer)
    # Packed samples have separate attention and positions per document anyway.
    rules = None if packs else document_rules(config, sources, opened.tokenizer)
    numbers = {split: num_samples[split] for split in opened.blends}
    parts = _open_datasets(config, opened.blends, numbers)
    samples: dict[Split, Samples] = {}
    order: ContinuedDatasets[Sample] | None = None
    notes: list[str] = []
    for split, number in numbers.items():
        built = _SplitBuilder(config, split, number).build(parts[split])
        notes += built.notes
        if built.samples is not None:
            samples[split] = built.samples
        order = order or built.order
    if training.eval_iters and "valid" not in opened.blends:
        notes.append("no evaluation during training: there is no valid split")
    return TrainData(samples, vocab_size, shape, rules, tuple(notes), masks_loss=packs, order=order)


def _open_datasets(
    config: TrainConfig, blends: Mapping[Split, Sequence[Source]], numbers: Mapping[Split, int]
) -> dict[Split, list[Part]]:
    """Datasets of each split, of which the run takes the ``numbers`` of samples.

    Raises:
        DataError: the order of a dataset needs too much memory, or no document has the form that the config asks for.
    """
    training, data = config.training, config.data
    parts: dict[Split, list[Part]] = {split: [] for split in blends}
    sizes = {split: _megatron_sizes(config, sources, numbers[split]) for split, sources in blends.items()}
    for split, sources in blends.items():
        for source, size in zip(sources, sizes[split], strict=True):
            tokens, sequences, length, seed = source.tokens, source.sequences, training.seq_length, training.seed
            if data.sample_packing:
                try:
                    packed = PackedDataset(tokens, sequences, length, seed, data.answer_only_loss)
                except DataError as error:
                    raise DataError(f"{source.key}: {error}") from None
                parts[split].append((source, packed))
                continue
            prepared = tokens.prefix.parent / "cache"
            cache = None if source.cache is None else EpochIndexCache(source.cache, prepared)
            dataset = GPTDataset(tokens, sequences, length, seed, cache, size)
            if size is not None:
                _check_memory(source, dataset)
            parts[split].append((source, dataset))
    return parts


def _megatron_sizes(config: TrainConfig, sources: Sequence[Source], number: int) -> list[int | None]:
    """Number of samples of each source in Megatron-LM's order of the run; None: shuffle each epoch separately."""
    weights = [source.weight for source in sources if source.weight is not None]
    if config.data.sample_order != "megatron":
        return [None] * len(sources)
    if len(sources) == 1 and (sources[0].key != "data.data_path" or not weights):
        return [number]
    if not weights:
        return [None] * len(sources)
    return [math.ceil(math.ceil(number * share) * (1 + SURPLUS)) for share in normalized(weights)]


def _streamed(config: TrainConfig, shape: BatchShape) -> TrainData:
    def say(line: str) -> None:
        if shape.dp_rank == 0:
            print(f"data.streaming: {line}", flush=True)

    # Prefetched batches, the current batch and the previous one.
    stream, tokenizer, notes = open_stream(config, (DEPTH + 2) * shape.global_batch_size, say)
    vocab_size = vocabulary(config, (), tokenizer)
    assert tokenizer.vocab_size <= vocab_size
    return TrainData(stream.samples, vocab_size, shape, document_rules(config, (), tokenizer), notes, stream=stream)


@dataclass(frozen=True)
class BuiltSplit:
    """Samples of one split."""

    samples: Samples | None
    """None: the split is empty, and the run does not need it."""
    notes: tuple[str, ...]
    order: ContinuedDatasets[Sample] | None = None
    """The same samples with their resumable order, for training."""


class _SplitBuilder:
    """Builds the samples of one split from its datasets."""

    def __init__(self, config: TrainConfig, split: Split, num_samples: int) -> None:
        self._config = config
        self._split = split
        self._num_samples = num_samples

    def build(self, parts: Sequence[Part]) -> BuiltSplit:
        """Build the samples of ``parts``: a blend, or a single dataset.

        Raises:
            DataError: a required dataset is too short for a sample.
        """
        filled = [(source, dataset) for source, dataset in parts if dataset.has_samples]
        notes = [self._too_long(parts), self._too_short(parts)]
        if not filled:
            return BuiltSplit(None, _said(notes))
        datasets, folder = [dataset for _, dataset in filled], parts[0][0].cache
        shares = [1.0]
        if len(parts) > 1:
            weights = self._weights(filled)
            notes.append(self._repeats(filled, weights))
            shares = normalized(weights)
        if self._split == "train":
            records = [self._record(part, share) for part, share in zip(filled, shares, strict=True)]
            train: ContinuedDatasets[Sample] = ContinuedDatasets(records, datasets, folder)
            return BuiltSplit(train, _said(notes), train)
        if len(parts) == 1:
            return BuiltSplit(datasets[0], _said(notes))
        return BuiltSplit(BlendedDataset(datasets, BlendOrder(shares, folder)), _said(notes))

    def _record(self, part: Part, share: float) -> DatasetRecord:
        source, dataset = part
        return DatasetRecord(
            prefix=str(source.tokens.prefix.absolute()),
            lengths=source.tokens.lengths_digest(),
            bin_sha256=None if source.manifest is None else source.manifest.bin_sha256,
            sequences=(source.sequences.start, source.sequences.stop),
            seq_length=self._config.training.seq_length,
            seed=self._config.training.seed,
            order=dataset.order,
            eod=None if source.manifest is None else source.manifest.eod,
            share=share,
            marks=source.tokens.marks_digest(),
        )

    def _weights(self, parts: Sequence[Part]) -> list[float]:
        # Megatron-LM normalizes given weights before the blend normalizes them again, which affects rounding.
        given = [source.weight for source, _ in parts if source.weight is not None]
        return normalized(given) if given else [dataset.samples_per_epoch for _, dataset in parts]

    def _too_long(self, parts: Sequence[Part]) -> str | None:
        """Note about skipped documents; None: no document is skipped."""
        packed = [dataset for _, dataset in parts if isinstance(dataset, PackedDataset)]
        left_out = sum(dataset.too_long for dataset in packed)
        if not left_out:
            return None
        return (
            f"{parts[0][0].key}: {left_out:,} of the {sum(dataset.documents for dataset in packed):,} documents in the "
            f"{self._split} split are longer than training.seq_length + 1 and are skipped"
        )

    def _too_short(self, parts: Sequence[Part]) -> str | None:
        """Note about datasets without a sample that the run does not need.

        Raises:
            DataError: the run needs the dataset.
        """
        short = [(source, dataset) for source, dataset in parts if not dataset.has_samples]
        if not short:
            return None
        source, dataset = short[0]
        needed = self._config.training.seq_length + 1
        least = f"a document of 2 to {needed:,}" if isinstance(dataset, PackedDataset) else f"{needed:,}"
        problem = (
            f"{source.key}: the {self._split} split of {source.tokens.prefix} has {dataset.token_count:,} tokens in "
            f"{len(source.sequences):,} documents, but one sample needs {least}"
        )
        if self._split == "train":
            raise DataError(f"{problem}; lower training.seq_length or prepare more text")
        # With default shares the user did not ask for evaluation; with explicit shares or files a loss is expected.
        data = self._config.data
        by_default = source.key == "data.data_path" and data.split == type(data)().split
        if self._split == "test" or not self._config.training.eval_iters:
            return None
        if not by_default:
            raise DataError(f"{problem}; raise its share in data.split, or set training.eval_iters to 0")
        if len(short) == len(parts):
            return f"no evaluation on {self._split}: {problem}"
        more = f"; the same holds for {len(short) - 1} more" if len(short) > 1 else ""
        return f"evaluation on {self._split} skips a dataset: {problem}{more}"

    def _repeats(self, parts: Sequence[Part], weights: Sequence[float]) -> str | None:
        """Note about datasets that are repeated because of their weight; None: no dataset is."""
        if parts[0][0].weight is None or self._split != "train":
            return None
        length = self._config.training.seq_length
        times = [
            (share * self._num_samples * length / dataset.token_count, source)
            for share, (source, dataset) in zip(normalized(weights), parts, strict=True)
        ]
        often = sorted((pair for pair in times if pair[0] > 1), key=lambda pair: -pair[0])
        if not often:
            return None
        named = ", ".join(f"{source.tokens.prefix} {count:,.1f} times" for count, source in often[:MAX_NAMED])
        more = f" and {len(often) - MAX_NAMED} more" if len(often) > MAX_NAMED else ""
        return (
            f"{often[0][1].key}: these datasets are repeated, because they are small for their weights: {named}{more}"
        )


def _check_memory(source: Source, dataset: GPTDataset) -> None:
    """Refuse Megatron-LM's order if its index does not fit into memory during the build.

    A cached index is only mapped.

    Raises:
        DataError: names the needed and the available memory.
    """
    limit = memory_limit()
    if dataset.index_bytes > limit and not dataset.is_cached:
        raise DataError(
            f"data.sample_order: Megatron-LM's order of this run has {dataset.order} of {source.tokens.prefix}, which "
            f"needs {dataset.index_bytes >> 30:,} GiB of memory, but the limit of this process is {limit >> 30:,} GiB; "
            "set data.sample_order to stable, or train for fewer iterations"
        )


def samples_of_run(training: TrainingConfig, split: Split, sizes: BatchSizes) -> int:
    """Number of samples of a split in a run by Megatron-LM's rule (get_train_valid_test_num_samples)."""
    if split == "train":
        return sizes.samples_after(training.train_iters)
    if split == "valid":
        iterations = (training.train_iters // training.eval_interval + 1) * training.eval_iters
    else:
        iterations = training.eval_iters
    return iterations * sizes.full


def _said(notes: Sequence[str | None]) -> tuple[str, ...]:
    return tuple(note for note in notes if note is not None)
