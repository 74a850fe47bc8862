"""Indexed datasets of a config, by their headers, sizes and manifests. Torch-free; two round trips for all of them.

The trainer refuses the same files when it opens them (trainer.data.samples.sources, trainer.data.loading.build).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trainer.config.blends import DEFAULT_SPLIT, empty_split, parse_split, split_bounds
from trainer.config.errors import ConfigError
from trainer.config.formats.indexed_data import (
    HEADER,
    FormatError,
    IndexHeader,
    check_counts,
    check_listed_size,
    check_token_size,
    read_header,
)
from trainer.config.train_config import TrainConfig

_LONGEST_MANIFEST = 1 << 16


class Read(NamedTuple):
    """Request for bytes of a file."""

    path: str
    offset: int = 0
    limit: int = 0


class Part(NamedTuple):
    """Bytes of a file, and the size of the whole file."""

    data: bytes
    size: int


Reader = Callable[[Sequence[Read]], Sequence[Part | None]]
"""Reads many parts at once, on the machine that has the files; None for a file that cannot be read."""


@dataclass(frozen=True)
class Dataset:
    """A dataset that a config names.

    Attributes:
        key: config key that names it.
        prefix: its prefix, as the config has it.
        size: bytes of its .bin.
        header: of its .idx; None: not read, or damaged.
        manifest: content of its manifest; empty without one.
        problem: why the trainer would refuse its files; empty if it would not.
        split_tokens: split -> tokens, of the splits that data.split gives it and whose ends are known.
    """

    key: str
    prefix: str
    size: int = 0
    header: IndexHeader | None = None
    manifest: Mapping[str, Any] | None = None
    problem: str = ""
    split_tokens: Mapping[str, int] | None = None

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids of the tokenizer that made the data; None: unknown."""
        size = (self.manifest or {}).get("vocab_size")
        return size if isinstance(size, int) else None


def read_datasets(config: TrainConfig, read: Reader) -> list[Dataset]:
    """The indexed datasets of a config; none for streamed text or generated data. Files that are absent are left out.

    Args:
        config: of the run.
        read: reads the files as the job sees them.
    """
    if config.data.streaming or config.data.mock_data:
        return []
    named = list(dict.fromkeys(config.data_prefixes()))
    reads = [
        one
        for _, prefix in named
        for one in (
            Read(f"{prefix}.idx", 0, HEADER.size),
            Read(f"{prefix}.bin"),
            Read(f"{prefix}.json", 0, _LONGEST_MANIFEST),
        )
    ]
    parts = read(reads)
    found = []
    for number, (key, prefix) in enumerate(named):
        index, tokens, manifest = parts[3 * number : 3 * number + 3]
        if index is not None and tokens is not None:
            found.append(_of_parts(Dataset(key, prefix, tokens.size), index, manifest))
    return _with_ends(config, found, read)


def _of_parts(dataset: Dataset, index: Part, manifest: Part | None) -> Dataset:
    """The dataset with what its files' starts and sizes say."""
    try:
        header = read_header(f"{dataset.prefix}.idx", index.data, index.size)
        check_token_size(f"{dataset.prefix}.bin", dataset.size, header.token_bytes)
    except FormatError as error:
        return replace(dataset, problem=str(error))
    dataset = replace(dataset, header=header)
    if manifest is None:
        return dataset
    where = f"{dataset.prefix}.json"
    try:
        values = json.loads(manifest.data)
    except (ValueError, RecursionError) as error:
        return replace(dataset, problem=f"{where}: cannot be read as a manifest: {error}")
    if not isinstance(values, dict):
        problem = f"{where}: is not a manifest of schema 1 or 2; move the file away, or prepare the data again"
        return replace(dataset, problem=problem)
    return replace(dataset, manifest=values)


def _with_ends(config: TrainConfig, datasets: Sequence[Dataset], read: Reader) -> list[Dataset]:
    """The datasets with the problems and splits that their tables tell. One round trip."""
    reads: list[Read] = []
    for dataset in datasets:
        if dataset.header is not None and dataset.header.sequences:
            reads += _table_reads(config, dataset, dataset.header)
    parts = iter(read(reads) if reads else ())
    found = []
    for dataset in datasets:
        header = dataset.header
        if header is None:
            found.append(dataset)
            continue
        own = [next(parts) for _ in _table_reads(config, dataset, header)] if header.sequences else []
        numbers = [_number(part) for part in own]
        listed = numbers[0] + numbers[1] * header.token_bytes if numbers else 0
        found.append(_judged(config, dataset, header, listed, numbers[2:]))
    return found


def _table_reads(config: TrainConfig, dataset: Dataset, header: IndexHeader) -> list[Read]:
    """Last byte offset and last length, and the byte offsets at which the splits begin."""
    index = f"{dataset.prefix}.idx"
    reads = [Read(index, header.documents - 8, 8), Read(index, header.pointers - 4, 4)]
    if _divides_sequences(config, dataset):
        bounds = split_bounds(header.sequences, parse_split(config.data.split))
        reads += [Read(index, header.pointers + 8 * bound, 8) for bound in bounds if bound < header.sequences]
    return reads


def _judged(config: TrainConfig, dataset: Dataset, header: IndexHeader, listed: int, starts: Sequence[int]) -> Dataset:
    tokens = dataset.size // header.token_bytes
    counts = {"documents": header.entries - 1, "sequences": header.sequences, "tokens": tokens}
    name = dataset.prefix.rpartition("/")[2]
    try:
        check_listed_size(f"{dataset.prefix}.bin", f"{name}.idx", dataset.size, listed)
        manifest = dataset.manifest
        if manifest is not None and all(isinstance(manifest.get(count), int) for count in counts):
            check_counts(f"{dataset.prefix}.json", {count: manifest[count] for count in counts}, counts)
    except FormatError as error:
        return replace(dataset, problem=str(error))
    if dataset.key != "data.data_path":
        split = dataset.key.removeprefix("data.").removesuffix("_data_path")
        return replace(dataset, split_tokens={split: tokens})
    if not _divides_sequences(config, dataset):
        return dataset
    ends = [start // header.token_bytes for start in starts]
    ends += [tokens] * (4 - len(ends))
    shares = zip(("train", "valid", "test"), parse_split(config.data.split), ends, ends[1:], strict=False)
    return replace(dataset, split_tokens={split: stop - start for split, share, start, stop in shares if share})


def _divides_sequences(config: TrainConfig, dataset: Dataset) -> bool:
    """True if data.split divides the sequences of a dataset, not its documents."""
    by_documents = config.data.sample_packing or config.model.architecture != "decoder"
    return dataset.key == "data.data_path" and not by_documents


def _number(part: Part | None) -> int:
    return int.from_bytes(part.data if part is not None else b"", "little")


def split_problems(config: TrainConfig, datasets: Sequence[Dataset]) -> tuple[list[ConfigError], list[str]]:
    """Splits without a sample: problems where the trainer refuses them, and sentences where it goes on without.

    Of packed documents and masked words only the absence of documents is judged: the trainer counts their samples.
    """
    needed = config.training.seq_length + 1
    problems: list[ConfigError] = []
    notes: list[str] = []
    for dataset in datasets:
        if dataset.problem or dataset.header is None:
            continue
        for split, tokens in (dataset.split_tokens or {}).items():
            is_short = tokens == 0 if config.data.sample_order == "megatron" else tokens < needed
            text = f"the {split} split of {dataset.prefix} has {tokens:,} tokens, but one sample needs {needed:,}"
            if not is_short or split == "test" or (split == "valid" and not config.training.eval_iters):
                continue
            if split == "train":
                remedy = "lower training.seq_length, raise the first share of data.split, or prepare more text"
                problems.append(ConfigError(dataset.key, f"{text}; {remedy}"))
            # With default shares the user did not ask for evaluation.
            elif dataset.key != "data.data_path" or config.data.split != DEFAULT_SPLIT:
                remedy = "raise its share in data.split, or set training.eval_iters to 0"
                problems.append(ConfigError(dataset.key, f"{text}; {remedy}"))
        if not problems and config.training.eval_iters and dataset.key == "data.data_path":
            notes += _empty_valid(config, dataset, dataset.header)
    return problems, notes


def _empty_valid(config: TrainConfig, dataset: Dataset, header: IndexHeader) -> Iterator[str]:
    data, tokens = config.data, dataset.size // header.token_bytes
    count = header.sequences if config.model.architecture == "decoder" else header.entries - 1
    sample = 2 if data.sample_packing else config.training.seq_length + 1
    held = (dataset.split_tokens or {}).get("valid")
    if sentence := empty_split("valid", dataset.prefix, count, tokens, data.split, sample, held):
        yield f"no evaluation during training: {sentence}"
