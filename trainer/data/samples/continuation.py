"""Going on with the data that a checkpoint was trained on, after what the run reads has changed or not.

``consumed_samples`` alone says where a run was only while nothing else has changed. So a checkpoint keeps, of each
dataset that was trained on, what the order of its samples follows from, and how many of them had been drawn where the
blend at hand began. A dataset that is still there goes on at its place whatever share it has now, and whatever was
added to the blend or left out of it: nothing is read twice before its turn, and nothing is passed over. One that was
left out and comes back goes on, too. What would put the samples of a dataset into another order is refused.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.samples.blend import BlendOrder, Numbered, normalized
from trainer.data.samples.windows import Numbers, Tokens, read_blended, read_windows

T_co = TypeVar("T_co", covariant=True)
MOST_NAMED = 3
"""Datasets that a line names at most."""
MARKS = 5
"""Places of a dataset whose tokens are compared, from its first to its last: another file differs in all of them, and
thousands of files are opened in a moment."""
MARK_TOKENS = 64
"""Compared at each of them."""
_MOST_DRAWN = 1 << 62


@dataclass(frozen=True)
class DatasetRecord:
    """What a checkpoint keeps of one dataset.

    Attributes:
        prefix: of its files.
        lengths: digest of the lengths of its sequences.
        bin_sha256: of its tokens; None where no manifest tells it.
        sequences: first and end of those that are trained on.
        seq_length: tokens per sample.
        seed: of the order.
        order: which one, in words.
        eod: token that ends its documents; None where no manifest tells it.
        share: of the blend; 0 where it was left out.
        drawn: samples of it that come before the blend.
        marks: digest of some of its tokens; None in checkpoints of before there was one.
    """

    prefix: str
    lengths: str
    bin_sha256: str | None
    sequences: tuple[int, int]
    seq_length: int
    seed: int
    order: str
    eod: int | None = None
    share: float = 1.0
    drawn: int = 0
    marks: str | None = None

    def holds_the_same(self, other: DatasetRecord) -> bool:
        """Whether the tokens are those of ``other``, as far as both tell, wherever the files lie now."""
        if self.lengths != other.lengths or (None not in (self.marks, other.marks) and self.marks != other.marks):
            return False
        if self.bin_sha256 is None or other.bin_sha256 is None:
            return Path(self.prefix).name == Path(other.prefix).name
        return self.bin_sha256 == other.bin_sha256


def lengths_digest(tokens: IndexedDataset) -> str:
    """Of the lengths of all sequences: half a second for 10^8 of them, besides reading them."""

    def read() -> bytes:
        lengths = np.ascontiguousarray(tokens.sequence_lengths, "<i4")
        return hashlib.blake2b(lengths.data, digest_size=12).digest()

    return tokens.remembered("digest of lengths", read).hex()


def marks_digest(tokens: IndexedDataset) -> str:
    """Of some tokens, which tell another file of the same lengths: a few reads, however large it is."""
    last = max(0, tokens.token_count - MARK_TOKENS)
    starts = [last * number // (MARKS - 1) for number in range(MARKS)]
    found = np.concatenate([tokens.read(start, min(start + MARK_TOKENS, tokens.token_count)) for start in starts])
    return hashlib.blake2b(found.astype("<i8").data, digest_size=8).hexdigest()


class ContinuedDatasets(Generic[T_co]):
    """The training samples of a run: one dataset, or a blend of several in proportion to their shares."""

    def __init__(
        self, records: Sequence[DatasetRecord], datasets: Sequence[Numbered[T_co]], folder: Path | None = None
    ) -> None:
        """Samples from the beginning of each of ``datasets``.

        Args:
            records: of each dataset; the shares are positive and add up to 1.
            datasets: at least one.
            folder: where what was worked out of a blend is kept; None: nowhere.
        """
        self._records = tuple(records)
        self._datasets = tuple(datasets)
        self._left_out: tuple[DatasetRecord, ...] = ()
        self._first = 0
        self._folder = folder
        self._library: Path | None = None
        self._order = self._order_of(self._records)

    def _order_of(self, records: Sequence[DatasetRecord]) -> BlendOrder | None:
        if len(records) < 2:
            return None
        return BlendOrder([record.share for record in records], self._folder, self._library)

    def use_library(self, library: Path | None) -> None:
        """Find the order of a blend with ``library``, as BlendOrder; it stays the same."""
        self._library = library
        if self._order is not None:
            self._order.use_library(library)

    def sample(self, number: int) -> T_co:
        """Sample ``number`` of the run, none before the one that was gone on from."""
        place = number - self._first
        assert place >= 0, (number, self._first)
        which, within = self._order.place(place) if self._order is not None else (0, place)
        return self._datasets[which].sample(self._records[which].drawn + within)

    def windows(self, numbers: Numbers) -> Tokens:
        """``sample`` of each of ``numbers``, which ascend and are windows: [N, S + 1]."""
        places = numbers - self._first
        assert places[0] >= 0, (numbers[0], self._first)
        if self._order is None:
            return read_windows(self._datasets[0], places + self._records[0].drawn)
        which, within = self._order.places(places)
        return read_blended(self._datasets, which, within + np.array([record.drawn for record in self._records])[which])

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint, the same ones during a whole attempt."""
        return {"first": self._first, "datasets": [asdict(record) for record in self._records + self._left_out]}

    def restore(self, state: Mapping[str, Any], consumed_samples: int) -> str | None:
        """Go on from what a checkpoint holds that was written after ``consumed_samples``.

        Returns:
            What has changed, in one line; None: nothing.

        Raises:
            DataError: the samples of a dataset that is still there have another order now, or other tokens; or the
                checkpoint's place in the data cannot be read.
        """
        if "datasets" not in state:
            self._first = consumed_samples
            return "data: the run was on text that was streamed; these files are read from their beginning"
        first, before = _read_state(state, consumed_samples)
        found = _matches(self._records, before)
        active = [place for place, record in enumerate(before) if record.share]
        goes_on = found == active and all(
            record.share == before[place].share for record, place in zip(self._records, active, strict=True)
        )
        if goes_on:
            self._first = first
        else:
            before = self._drawn_by(before, active, consumed_samples - first)
            self._first = consumed_samples
        line = None if goes_on else _line(self._records, before, found, consumed_samples)
        still_there = set(found)
        self._left_out = tuple(replace(one, share=0.0) for place, one in enumerate(before) if place not in still_there)
        self._records = tuple(
            record if place is None else replace(record, drawn=before[place].drawn)
            for record, place in zip(self._records, found, strict=True)
        )
        return line

    def _drawn_by(self, before: list[DatasetRecord], active: list[int], number: int) -> list[DatasetRecord]:
        """``before``, with what each has drawn at sample ``number`` of its blend."""
        order = self._order_of([before[place] for place in active])
        counts = [number] if order is None else order.counts(number).tolist()
        drawn = dict(zip(active, counts, strict=True))
        return [replace(record, drawn=record.drawn + drawn.get(place, 0)) for place, record in enumerate(before)]


def end_of_documents(state: Mapping[str, Any] | None) -> int | None:
    """The token that ended the documents that were trained on last, by what a checkpoint holds; None: it does not tell.

    What generates with a model stops at it, whatever the tokenizer at hand would name.
    """
    datasets = [] if state is None else state.get("datasets", [])
    ends = {entry.get("eod") for entry in datasets if entry.get("share")}
    return ends.pop() if len(ends) == 1 else None


def shares_of(weights: Sequence[float]) -> list[float]:
    """The share of each dataset of a blend; that of a single one is 1."""
    return normalized(weights) if len(weights) > 1 else [1.0]


def _read_state(state: Mapping[str, Any], consumed_samples: int) -> tuple[int, list[DatasetRecord]]:
    """The sample at which the blend of ``state`` began, and its datasets.

    Raises:
        DataError: another version wrote it, or it is damaged.
    """
    try:
        entries = [{**entry, "sequences": tuple(entry["sequences"])} for entry in state["datasets"]]
        first, records = int(state["first"]), [DatasetRecord(**entry) for entry in entries]
        if not (0 <= first <= consumed_samples and all(map(_can_be, records)) and any(one.share for one in records)):
            raise ValueError(f"sample {first:,} of {consumed_samples:,}, {len(records):,} datasets")
        return first, records
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"data: the checkpoint's place in the data is damaged, or of another version ({error}); go on with the "
            "version that wrote it, or begin another run with the weights, by checkpoint.load and checkpoint.finetune"
        ) from None


def _can_be(record: DatasetRecord) -> bool:
    """Whether there can be such a record; raises TypeError where what should be a number is none."""
    first, end = record.sequences
    has_names = isinstance(record.prefix, str) and isinstance(record.lengths, str)
    return has_names and 0 <= first <= end and 0 <= record.share <= 1 and 0 <= record.drawn < _MOST_DRAWN


def _matches(records: Sequence[DatasetRecord], before: Sequence[DatasetRecord]) -> list[int | None]:
    """For each of ``records`` its place in ``before``; None: it is new. Blends have thousands of datasets.

    Raises:
        DataError: it is there, but is not what it was.
    """
    found: list[int | None] = []
    # Places that are not taken yet.
    by_lengths: defaultdict[str, list[int]] = defaultdict(list)
    by_prefix: defaultdict[str, list[int]] = defaultdict(list)
    for place, one in enumerate(before):
        by_lengths[one.lengths].append(place)
        by_prefix[one.prefix].append(place)
    for record in records:
        same = [place for place in by_lengths[record.lengths] if record.holds_the_same(before[place])]
        named = by_prefix[record.prefix]
        if named and not same:
            raise DataError(
                f"{record.prefix}: was prepared anew since the checkpoint was written, and consumed_samples counts "
                "samples of what it was; put the former files back, or give the new ones another prefix"
            )
        # The same file may be named several times.
        best = min(
            same, key=lambda place: (before[place].prefix != record.prefix, not before[place].share), default=None
        )
        if best is not None:
            _check_order(record, before[best])
            by_lengths[before[best].lengths].remove(best)
            by_prefix[before[best].prefix].remove(best)
        found.append(best)
    return found


def _check_order(record: DatasetRecord, before: DatasetRecord) -> None:
    keys = {
        "sequences": "data.split",
        "seq_length": "training.seq_length",
        "seed": "training.seed",
        "order": "data.sample_order",
    }
    for name, key in keys.items():
        now, then = getattr(record, name), getattr(before, name)
        if now == then:
            continue
        if name == "sequences":
            now, then = (f"documents {start:,} to {stop:,}" for start, stop in (now, then))
        raise DataError(
            f"{key}: the checkpoint was trained on {record.prefix} with {then}, and this run has {now}, which puts its "
            "samples into another order that cannot be gone on with; set it as it was, or begin another run with the "
            "weights, by checkpoint.load and checkpoint.finetune"
        )


def _line(
    records: Sequence[DatasetRecord], before: Sequence[DatasetRecord], found: Sequence[int | None], consumed: int
) -> str:
    """What has changed from ``before`` to ``records``."""
    still_there = set(found)
    kept = [(record, before[place]) for record, place in zip(records, found, strict=True) if place is not None]
    parts = [
        _named(
            "now {} of the samples",
            [f"{now.prefix} {now.share:.4g} (was {then.share:.4g})" for now, then in kept if now.share != then.share],
        ),
        _named("new: {}", [record.prefix for record, place in zip(records, found, strict=True) if place is None]),
        _named(
            "left out: {}",
            [one.prefix for place, one in enumerate(before) if one.share and place not in still_there],
        ),
    ]
    told = "; ".join(part for part in parts if part) or "the datasets stand in another order"
    goes_on = "what was there before goes on at its place" if kept else "all of it is read from its beginning"
    return f"data: from sample {consumed:,} on from another blend ({told}); {goes_on}"


def _named(text: str, names: Sequence[str]) -> str | None:
    if not names:
        return None
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return text.format(", ".join(names[:MOST_NAMED]) + more)
