"""Datasets of a config: opening, division into splits, vocabulary and document rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.blends import BlendPart, parse_split
from trainer.config.train_config import TrainConfig
from trainer.data.errors import DataError
from trainer.data.indexed.checksum_cache import ChecksumCache
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import Manifest, read_manifest
from trainer.data.samples.batches import Packing, Split
from trainer.data.samples.gpt_dataset import split_sequences
from trainer.data.tokenizers.factory import load_tokenizer
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
    weight: float | None = None
    """Weight in a blend, relative to the other datasets'; None: in proportion to its size."""


def open_sources(config: TrainConfig) -> dict[Split, Source]:
    """Open the dataset of each split, for callers that support one dataset per split.

    Raises:
        DataError: as in open_blends, or a split is a blend of several datasets.
    """
    return {split: single_source(sources) for split, sources in open_blends(config).items()}


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


def open_blends(config: TrainConfig) -> dict[Split, tuple[Source, ...]]:
    """Open the datasets of each split with a share and a weight above 0.

    Raises:
        DataError: the config names no data, files are missing or damaged, or the data was tokenized with another
            tokenizer than the config's, or with different tokenizers.
    """
    data = config.data
    if data.streaming:
        raise DataError("data.streaming: is not supported here; name the prefix of an indexed dataset")
    if not (data.train_data_path or data.data_path):
        raise DataError("data.data_path: is unset; name the prefix of an indexed dataset, or set data.mock_data: true")
    opener = _Opener(config)
    if data.train_data_path:
        named = {split: data.blend(f"{split}_data_path") for split in SPLITS}
        opened = {
            split: tuple(opener.open(f"data.{split}_data_path", part) for part in parts)
            for split, parts in named.items()
            if parts
        }
    else:
        whole = [opener.open("data.data_path", part) for part in data.blend("data_path")]
        shares = parse_split(data.split)
        by_documents = data.sample_packing or config.model.architecture != "decoder"
        parts_of = [_divide(source, shares, by_documents) for source in whole]
        opened = {
            split: tuple(replace(source, sequences=parts[place]) for source, parts in zip(whole, parts_of, strict=True))
            for place, (split, share) in enumerate(zip(SPLITS, shares, strict=True))
            if share
        }
    check_same_tokenizer(source for sources in opened.values() for source in sources)
    return opened


class _Opener:
    """Opens each indexed dataset once for all splits."""

    def __init__(self, config: TrainConfig) -> None:
        data = config.data
        settings = settings_of(data, config.model.vocab_size)
        self._tokenizer = load_tokenizer(data, config.model.vocab_size) if settings.is_set else None
        self._tokenizer_name = settings.name
        self._cache_path = data.data_cache_path
        self._opened: dict[Path, tuple[IndexedDataset, Manifest | None]] = {}

    def open(self, key: str, part: BlendPart) -> Source:
        """Open the whole dataset of ``part``."""
        prefix = Path(part.prefix).expanduser()
        try:
            if prefix not in self._opened:
                self._opened[prefix] = self._open(prefix)
            tokens, manifest = self._opened[prefix]
        except DataError as error:
            raise DataError(f"{key}: {error}") from None
        return Source(key, tokens, manifest, range(len(tokens)), part.weight)

    def _open(self, prefix: Path) -> tuple[IndexedDataset, Manifest | None]:
        folder = Path(self._cache_path).expanduser() if self._cache_path else prefix.parent / "cache"
        tokens, manifest = IndexedDataset(prefix, ChecksumCache(folder)), read_manifest(prefix)
        if manifest is not None:
            manifest.check_counts(tokens)
            if self._tokenizer is not None:
                manifest.check_tokenizer(prefix, self._tokenizer, self._tokenizer_name)
                manifest.check_end(prefix, self._tokenizer, self._tokenizer_name)
        return tokens, manifest


def _divide(source: Source, shares: tuple[float, float, float], by_documents: bool) -> list[range]:
    """Sequences of each split; with ``by_documents`` divided at document bounds."""
    if not by_documents:
        return split_sequences(len(source.tokens), shares)
    entries = source.tokens.document_indices
    parts = split_sequences(source.tokens.document_count, shares)
    return [range(int(entries[part.start]), int(entries[part.stop])) for part in parts]


def check_same_tokenizer(sources: Iterable[Source]) -> None:
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


def vocabulary(config: TrainConfig, sources: Iterable[Source]) -> int:
    """Vocabulary size: number of token ids, without padding.

    Raises:
        DataError: the size is unknown, or model.vocab_size is smaller than the tokenizer's.
    """
    manifests, tokenizer = _manifests_and_tokenizer(config, sources)
    known = [manifest.vocab_size for manifest in manifests] + ([tokenizer.vocab_size] if tokenizer else [])
    # A NullTokenizer's vocab_size excludes the end-of-document token, as in Megatron-LM.
    wanted = None if config.data.tokenizer_type == "NullTokenizer" else config.model.vocab_size
    vocab_size = wanted or (max(known) if known else None)
    if vocab_size is None:
        raise DataError(
            "model.vocab_size: is unset, and the data has no manifest; set model.vocab_size or data.tokenizer_model"
        )
    if known and vocab_size < max(known):
        raise DataError(
            f"model.vocab_size: {vocab_size} is too small for the tokenizer of the data; use {max(known)}, or leave it "
            "unset"
        )
    return vocab_size


def document_rules(config: TrainConfig, sources: Sequence[Source]) -> Packing | None:
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
    ends = {source.manifest.eod: source for source in sources if source.manifest is not None}
    if len(ends) > 1:
        (one, first), (other, second) = list(ends.items())[:2]
        raise DataError(
            f"data.{asked[0]}: documents of {first.tokens.prefix} end with token {one}, "
            f"but those of {second.tokens.prefix} with {other}; prepare one of the two again with the other's "
            "--eod-token"
        )
    manifests, tokenizer = _manifests_and_tokenizer(config, sources)
    without = next((source for source in sources if source.manifest is None), None)
    if manifests and without is not None and not settings_of(data, config.model.vocab_size).is_set:
        raise DataError(
            f"data.{asked[0]}: {without.tokens.prefix} has no manifest with its end-of-document token, unlike others "
            "of the blend; set data.tokenizer_model to the tokenizer of both, or prepare it again"
        )
    eod = next((manifest.eod for manifest in manifests), tokenizer.eod if tokenizer else None)
    if eod is None:
        remedy = "prepare the data with --append-eod" + (" and --eod-token" if tokenizer else "")
        raise DataError(
            f"data.{asked[0]}: the end-of-document token is unknown; "
            + (remedy if tokenizer else f"set data.tokenizer_model, or {remedy}")
        )
    return Packing(eod, data.eod_mask_loss, data.reset_attention_mask, data.reset_position_ids)


def _manifests_and_tokenizer(config: TrainConfig, sources: Iterable[Source]) -> tuple[list[Manifest], Tokenizer | None]:
    """Manifests of the sources, and the tokenizer if the manifests are not sufficient."""
    manifests = [source.manifest for source in sources if source.manifest is not None]
    by_numbers = config.data.tokenizer_type == "NullTokenizer"
    if by_numbers or (not manifests and settings_of(config.data, config.model.vocab_size).is_set):
        return manifests, load_tokenizer(config.data, config.model.vocab_size)
    return manifests, None
