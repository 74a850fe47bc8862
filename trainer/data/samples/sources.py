"""Datasets of a config: opening, division into splits, vocabulary and document rules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.blends import BlendPart, parse_blend, parse_split, split_bounds
from trainer.config.train_config import TrainConfig
from trainer.data.errors import DataError
from trainer.data.indexed.checksum_cache import ChecksumCache
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import Manifest, read_manifest
from trainer.data.samples.batches import Packing, Split
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import settings_of
from trainer.data.tokenizers.tokenizer import Tokenizer

SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class Source:
    """An open indexed dataset, and its sequences that belong to a split."""

    key: str
    """Config key that names the dataset."""
    tokens: IndexedDataset
    manifest: Manifest | None
    sequences: range
    cache: Path | None
    """Folder for what is computed about the dataset, which need not exist; None: no folder can be written."""
    weight: float | None = None
    """Weight in a blend, relative to the other datasets'; None: in proportion to its size."""


@dataclass(frozen=True)
class OpenData:
    """Open datasets of a config."""

    blends: dict[Split, tuple[Source, ...]]
    """Datasets of each split that has a share."""
    tokenizer: Tokenizer | None
    """Tokenizer of the config; None: the config names none."""

    @property
    def sources(self) -> list[Source]:
        """Datasets of all splits."""
        return [source for sources in self.blends.values() for source in sources]


def open_sources(config: TrainConfig) -> dict[Split, Source]:
    """Open the dataset of each split, for callers that support one dataset per split.

    Raises:
        DataError: as in open_data, or a split is a blend of several datasets.
    """
    return {split: single_source(sources) for split, sources in open_data(config).blends.items()}


def single_source(sources: tuple[Source, ...]) -> Source:
    """Return the single element of ``sources``.

    Raises:
        DataError: there are several sources.
    """
    if len(sources) > 1:
        raise DataError(
            f"{sources[0].key}: is a blend of {len(sources)} datasets, but only a single one is supported here; name "
            f"one, such as {sources[0].tokens.prefix}"
        )
    return sources[0]


def open_data(config: TrainConfig, run_dir: Path | None = None) -> OpenData:
    """Open the datasets of each split with a share and a weight above 0.

    Args:
        config: the run's config.
        run_dir: parent of the cache if the data's folder is read-only; None: no cache then.

    Raises:
        DataError: the config names no data, files are missing or damaged, or the data was tokenized with another
            tokenizer than the config's, or with different tokenizers.
    """
    data = config.data
    if data.streaming:
        raise DataError("data.streaming: is not supported here; name the prefix of an indexed dataset")
    if not (data.train_data_path or data.data_path):
        raise DataError("data.data_path: is unset; name the prefix of an indexed dataset, or set data.mock_data: true")
    settings = settings_of(data, config.model.vocab_size)
    name, tokenizer = settings.name, open_tokenizer(settings) if settings.is_set else None
    # One opener for all splits: a dataset may be named in several.
    opener = _Opener(config, tokenizer, name, run_dir)
    if data.train_data_path:
        keys = [(split, f"data.{split}_data_path", getattr(data, f"{split}_data_path")) for split in SPLITS]
        opened = {
            split: tuple(opener.open_all(key, parse_blend(key, entries))) for split, key, entries in keys if entries
        }
    else:
        parts, shares = parse_blend("data.data_path", data.data_path), parse_split(data.split)
        whole = opener.open_all("data.data_path", parts)
        by_documents = data.sample_packing or config.model.architecture != "decoder"
        divided = [_divide(source, shares, by_documents) for source in whole]
        opened = {
            split: tuple(replace(source, sequences=own[place]) for source, own in zip(whole, divided, strict=True))
            for place, (split, share) in enumerate(zip(SPLITS, shares, strict=True))
            if share
        }
    found = OpenData(opened, tokenizer)
    check_same_tokenizer(found.sources)
    return found


class _Opener:
    """Opens each indexed dataset once for all splits."""

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer | None, name: str, run_dir: Path | None) -> None:
        self._tokenizer = tokenizer
        self._tokenizer_name = name
        self._cache_path = config.data.data_cache_path
        self._run_dir = run_dir
        self._opened: dict[Path, tuple[IndexedDataset, range, Manifest | None]] = {}

    def open_all(self, key: str, parts: Sequence[BlendPart]) -> list[Source]:
        """Open the whole datasets of ``parts``, which ``key`` names."""
        sources = []
        for part in parts:
            prefix = Path(part.prefix).expanduser()
            try:
                if prefix not in self._opened:
                    self._opened[prefix] = self._open(prefix)
                tokens, whole, manifest = self._opened[prefix]
            except DataError as error:
                raise DataError(f"{key}: {error}") from None
            sources.append(Source(key, tokens, manifest, whole, self._cache_of(prefix), part.weight))
        return sources

    def _open(self, prefix: Path) -> tuple[IndexedDataset, range, Manifest | None]:
        folder = Path(self._cache_path).expanduser() if self._cache_path else prefix.parent / "cache"
        tokens = IndexedDataset(prefix, ChecksumCache(folder))
        whole, manifest = range(len(tokens)), read_manifest(prefix)
        if manifest is not None:
            manifest.check_counts(tokens)
            if self._tokenizer is not None:
                manifest.check_tokenizer(prefix, self._tokenizer, self._tokenizer_name)
                manifest.check_end(prefix, self._tokenizer, self._tokenizer_name)
        return tokens, whole, manifest

    def _cache_of(self, prefix: Path) -> Path | None:
        """data.data_cache_path, or ``cache`` beside the dataset, or in the run directory if the former is read-only."""
        if self._cache_path:
            return Path(self._cache_path).expanduser()
        beside = prefix.parent / "cache"
        if os.access(beside if beside.is_dir() else prefix.parent, os.W_OK):
            return beside
        return self._run_dir / "cache" if self._run_dir else None


def split_sequences(count: int, shares: Sequence[float]) -> list[range]:
    """Sequences of each split, by Megatron-LM's rule; for GPT data a sequence is a non-empty document."""
    bounds = split_bounds(count, shares)
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def _divide(source: Source, shares: tuple[float, float, float], by_documents: bool) -> list[range]:
    """Sequences of each split; with ``by_documents`` divided at document bounds."""
    if not by_documents:
        return split_sequences(len(source.sequences), shares)
    entries = source.tokens.document_indices
    parts = split_sequences(source.tokens.document_count, shares)
    return [range(int(entries[part.start]), int(entries[part.stop])) for part in parts]


def check_same_tokenizer(sources: Sequence[Source]) -> None:
    """Refuse to mix data of different tokenizers.

    Raises:
        DataError: two manifests name different tokenizers.
    """
    first: Source | None = None
    for source in sources:
        if source.manifest is None:
            continue
        first = first or source
        assert first.manifest is not None
        if source.manifest.tokenizer_sha256 != first.manifest.tokenizer_sha256:
            raise DataError(
                f"{source.key}: {source.tokens.prefix} was tokenized with another tokenizer (sha256 "
                f"{source.manifest.tokenizer_sha256[:12]}) than {first.tokens.prefix} "
                f"({first.manifest.tokenizer_sha256[:12]}); prepare one of the two again"
            )


def vocabulary(config: TrainConfig, sources: Sequence[Source], tokenizer: Tokenizer | None) -> int:
    """Vocabulary size: number of token ids, without padding.

    Raises:
        DataError: the size is unknown, or model.vocab_size is smaller than the tokenizer's.
    """
    known = [source.manifest.vocab_size for source in sources if source.manifest is not None]
    # A NullTokenizer's vocab_size excludes the end-of-document token, as in Megatron-LM.
    by_numbers = config.data.tokenizer_type == "NullTokenizer"
    wanted = None if by_numbers else config.model.vocab_size
    # Also beside manifests: T5's sentinels are tokens that the data was prepared without.
    if tokenizer is not None:
        known.append(tokenizer.vocab_size)
    vocab_size = wanted or (max(known) if known else None)
    if vocab_size is None:
        raise DataError(
            "model.vocab_size: is unset, and the data has no manifest; set model.vocab_size or data.tokenizer_model"
        )
    if known and vocab_size < max(known) and config.checkpoint.load is not None and not config.continues_save:
        raise DataError(
            f"model.vocab_size: the tables of {config.checkpoint.load} have {vocab_size} rows; the "
            f"tokenizer of the data has {max(known)} tokens; prepare the data with the model's own tokenizer"
        )
    if known and vocab_size < max(known):
        raise DataError(
            f"model.vocab_size: {vocab_size} is too small for the tokenizer of the data; use {max(known)}, or leave it "
            "unset"
        )
    return vocab_size


def document_rules(config: TrainConfig, sources: Sequence[Source], tokenizer: Tokenizer | None) -> Packing | None:
    """Document rules of the config for ``sources``; None: no rules.

    Raises:
        DataError: the config has rules, but the end-of-document token is unknown.
    """
    data = config.data
    asked = [name for name in ("eod_mask_loss", "reset_attention_mask", "reset_position_ids") if getattr(data, name)]
    if not asked:
        return None
    if data.mock_data:
        raise DataError(f"data.{asked[0]}: mock data has no documents; leave it out, or name data in data.data_path")
    for source in sources:
        if source.manifest is not None and source.manifest.eod is None:
            raise DataError(
                f"data.{asked[0]}: {source.tokens.prefix} was prepared without --append-eod; prepare it again with the "
                "flag"
            )
    # A blend has one rule, so that all its datasets must end documents with the same token.
    ends = {source.manifest.eod: source for source in sources if source.manifest is not None}
    if len(ends) > 1:
        (one, first), (other, second) = list(ends.items())[:2]
        raise DataError(
            f"data.{asked[0]}: documents of {first.tokens.prefix} end with token {one}, "
            f"but those of {second.tokens.prefix} with {other}; prepare one of the two again with the other's "
            "--eod-token"
        )
    without = next((source for source in sources if source.manifest is None), None)
    if ends and without is not None and tokenizer is None:
        raise DataError(
            f"data.{asked[0]}: {without.tokens.prefix} has no manifest with its end-of-document token, unlike others "
            "of the blend; set data.tokenizer_model to the tokenizer of both, or prepare it again"
        )
    eod = next(iter(ends)) if ends else tokenizer.eod if tokenizer else None
    if eod is None:
        remedy = "prepare the data with --append-eod" + (" and --eod-token" if tokenizer else "")
        raise DataError(
            f"data.{asked[0]}: the end-of-document token is unknown; "
            + (remedy if tokenizer else f"set data.tokenizer_model, or {remedy}")
        )
    return Packing(eod, data.eod_mask_loss, data.reset_attention_mask, data.reset_position_ids)
