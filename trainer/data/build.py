"""The data of a run, as its config asks for it, checked before the first step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trainer.config import TrainConfig
from trainer.config_checks import parse_split
from trainer.data.batches import BatchShape, Packing, Samples, Split, TrainData
from trainer.data.epoch_index import EpochIndexCache
from trainer.data.errors import DataError
from trainer.data.gpt_dataset import GPTDataset, split_sequences
from trainer.data.indexed_dataset import IndexedDataset
from trainer.data.manifest import Manifest, read_manifest
from trainer.data.mock import DEFAULT_VOCAB_SIZE, MockDataset
from trainer.data.tokenizer import Tokenizer, load_tokenizer

SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class Source:
    """One open pair of token files, and the sequences of it that make up a split."""

    key: str
    """Config key that named it."""
    tokens: IndexedDataset
    manifest: Manifest | None
    sequences: range


def build_data(config: TrainConfig, dp_rank: int, dp: int, run_dir: Path | None = None) -> TrainData:
    """Open what ``config.data`` names. Every rank calls it, and none needs another.

    Args:
        config: the run's config.
        dp_rank: this rank's place along the data-parallel axis.
        dp: number of replicas.
        run_dir: where index caches go if the data's folder is read-only; None: nowhere.

    Raises:
        DataError: files are missing or damaged, their tokens do not fit the model, or they are too few.
    """
    training = config.training
    shape = BatchShape(
        training.micro_batch_size, config.global_batch_size(dp), training.seq_length, dp=dp, dp_rank=dp_rank
    )
    if config.data.mock_data:
        document_rules(config, {})
        vocab_size = config.model.vocab_size or DEFAULT_VOCAB_SIZE
        return TrainData(
            {
                split: MockDataset(vocab_size, training.seq_length, training.seed, number)
                for number, split in enumerate(SPLITS)
            },
            vocab_size,
            shape,
            notes=("mock data: nothing that this model learns is of use",),
        )
    sources = open_sources(config)
    vocab_size = _vocabulary(config, sources)
    samples: dict[Split, Samples] = {}
    notes: list[str] = []
    for split, source in sources.items():
        cache = _cache(config, source.tokens.prefix, run_dir)
        dataset = GPTDataset(source.tokens, source.sequences, training.seq_length, training.seed, cache)
        problem = _shortage(config, split, source, dataset)
        if problem:
            notes.append(problem)
        elif dataset.samples_per_epoch:
            samples[split] = dataset
    if training.eval_iters and "valid" not in sources:
        notes.append("no evaluation while training: there is no valid split")
    return TrainData(samples, vocab_size, shape, document_rules(config, sources), tuple(notes))


def open_sources(config: TrainConfig) -> dict[Split, Source]:
    """The token files of each split that the config asks for; without those of share 0.

    Raises:
        DataError: nothing is named, or files are missing, damaged or made with another tokenizer.
    """
    data = config.data
    tokenizer = None
    if data.tokenizer_model or data.tokenizer_type == "NullTokenizer":
        tokenizer = load_tokenizer(data, config.model.vocab_size)
    tokenizer_name = data.tokenizer_model or data.tokenizer_type
    if data.train_data_path:
        named: dict[Split, list[str]] = {"train": data.train_data_path, "valid": data.valid_data_path}
        return {
            split: _open_whole(f"data.{split}_data_path", paths[0], tokenizer, tokenizer_name)
            for split, paths in named.items()
            if paths
        }
    if not data.data_path:
        raise DataError("data.data_path: is unset; name the prefix of a .bin/.idx pair, or set data.mock_data: true")
    tokens, manifest = _open(
        "data.data_path", data.data_path[0], tokenizer, data.tokenizer_model or data.tokenizer_type
    )
    shares = parse_split(data.split)
    return {
        split: Source("data.data_path", tokens, manifest, sequences)
        for split, share, sequences in zip(SPLITS, shares, split_sequences(len(tokens), shares), strict=True)
        if share
    }


def _open_whole(key: str, path: str, tokenizer: Tokenizer | None, tokenizer_name: str) -> Source:
    tokens, manifest = _open(key, path, tokenizer, tokenizer_name)
    return Source(key, tokens, manifest, range(len(tokens)))


def _open(
    key: str, path: str, tokenizer: Tokenizer | None, tokenizer_name: str
) -> tuple[IndexedDataset, Manifest | None]:
    prefix = Path(path).expanduser()
    try:
        tokens = IndexedDataset(prefix)
        manifest = read_manifest(prefix)
        if manifest is not None and tokenizer is not None:
            manifest.check_tokenizer(prefix, tokenizer, tokenizer_name)
    except DataError as error:
        raise DataError(f"{key}: {error}") from None
    return tokens, manifest


def _manifests_and_tokenizer(
    config: TrainConfig, sources: dict[Split, Source]
) -> tuple[list[Manifest], Tokenizer | None]:
    """What tells of the vocabulary: the manifests there are, and the tokenizer where they do not tell all."""
    manifests = [source.manifest for source in sources.values() if source.manifest is not None]
    by_numbers = config.data.tokenizer_type == "NullTokenizer"
    if by_numbers or (not manifests and config.data.tokenizer_model):
        return manifests, load_tokenizer(config.data, config.model.vocab_size)
    return manifests, None


def _vocabulary(config: TrainConfig, sources: dict[Split, Source]) -> int:
    """Number of token ids."""
    manifests, tokenizer = _manifests_and_tokenizer(config, sources)
    known = [manifest.vocab_size for manifest in manifests] + ([tokenizer.vocab_size] if tokenizer else [])
    # A NullTokenizer's vocab_size counts the numbers, as in Megatron-LM, and not the end of a document.
    wanted = None if config.data.tokenizer_type == "NullTokenizer" else config.model.vocab_size
    vocab_size = wanted or (max(known) if known else None)
    if vocab_size is None:
        raise DataError(
            "model.vocab_size: is unset, and the data has no manifest that tells it; set it, or data.tokenizer_model"
        )
    if known and vocab_size < max(known):
        raise DataError(
            f"model.vocab_size: {vocab_size} is too small for the tokenizer of the data; set it to {max(known)} or "
            "leave it unset"
        )
    return vocab_size


def document_rules(config: TrainConfig, sources: dict[Split, Source]) -> Packing | None:
    """What the config asks for about the documents of ``sources``; None: nothing.

    Raises:
        DataError: it asks, and nothing tells where documents end.
    """
    data = config.data
    asked = [name for name in ("eod_mask_loss", "reset_attention_mask", "reset_position_ids") if getattr(data, name)]
    if not asked:
        return None
    if data.mock_data:
        raise DataError(f"data.{asked[0]}: mock data has no documents; leave it out, or name data in data.data_path")
    for source in sources.values():
        if source.manifest is not None and source.manifest.eod is None:
            raise DataError(
                f"data.{asked[0]}: {source.tokens.prefix} was prepared without --append-eod; prepare it again with it"
            )
    manifests, tokenizer = _manifests_and_tokenizer(config, sources)
    eod = next((manifest.eod for manifest in manifests), tokenizer.eod if tokenizer else None)
    if eod is None:
        remedy = "prepare the data with --append-eod" + (" and --eod-token" if tokenizer else "")
        raise DataError(
            f"data.{asked[0]}: nothing tells which token ends a document; "
            + (remedy if tokenizer else f"set data.tokenizer_model, or {remedy}")
        )
    return Packing(eod, data.eod_mask_loss, data.reset_attention_mask, data.reset_position_ids)


def _shortage(config: TrainConfig, split: Split, source: Source, dataset: GPTDataset) -> str | None:
    """A note if ``split`` holds no sample and the run can do without it.

    Raises:
        DataError: it cannot.
    """
    if dataset.samples_per_epoch:
        return None
    needed = config.training.seq_length + 1
    problem = (
        f"{source.key}: the {split} split of {source.tokens.prefix} holds {dataset.token_count:,} tokens in "
        f"{len(source.sequences):,} documents, but one sample needs {needed:,}"
    )
    if split == "train":
        raise DataError(f"{problem}; lower training.seq_length or prepare more text")
    # Nobody asked for the split's default shares; who wrote them, or named a file, wants to see a loss.
    by_default = source.key == "data.data_path" and config.data.split == type(config.data)().split
    if split == "valid" and config.training.eval_iters and not by_default:
        raise DataError(f"{problem}; give it more of data.split, or set training.eval_iters to 0")
    return f"no evaluation on {split}: {problem}" if split == "valid" and config.training.eval_iters else None


def _cache(config: TrainConfig, prefix: Path, run_dir: Path | None) -> EpochIndexCache | None:
    if config.data.data_cache_path:
        return EpochIndexCache(Path(config.data.data_cache_path).expanduser())
    beside = prefix.parent / "cache"
    if beside.is_dir() or os.access(prefix.parent, os.W_OK):
        return EpochIndexCache(beside)
    return EpochIndexCache(run_dir / "cache") if run_dir else None
