"""Resuming the data order from a checkpoint, even if the blend has changed.

``consumed_samples`` alone gives the position only while nothing else changes. So a checkpoint records, for each dataset
of the run, the inputs of its sample order and the number of samples drawn before the current blend began. A dataset
that is still in the blend continues at its position, whatever its new share and whatever else was added or removed: no
sample is repeated early, and none is skipped. A dataset that was removed and comes back continues too. A change that
would reorder the samples of a dataset is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from trainer.data.errors import DataError
from trainer.data.samples.blend import BlendOrder, Numbered
from trainer.data.samples.windows import Numbers, Tokens, read_blended, read_windows

T_co = TypeVar("T_co", covariant=True)
MAX_NAMED = 3
"""Largest number of datasets named in a line."""
_MOST_DRAWN = 1 << 62


@dataclass(frozen=True)
class DatasetRecord:
    """Record of one dataset in a checkpoint.

    Attributes:
        prefix: prefix of its files.
        lengths: digest of the sequence lengths.
        bin_sha256: SHA-256 of the tokens; None without a manifest.
        sequences: first and end of the sequences used for training.
        seq_length: tokens per sample.
        seed: seed of the order.
        order: name of the order.
        eod: token that ends the documents; None without a manifest.
        share: share of the blend; 0 if removed from it.
        drawn: number of its samples drawn before the blend began.
        marks: digest of some of its tokens; None in older checkpoints.
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
        """True if the tokens equal ``other``'s, as far as recorded, at any path."""
        if self.lengths != other.lengths or (None not in (self.marks, other.marks) and self.marks != other.marks):
            return False
        if self.bin_sha256 is None or other.bin_sha256 is None:
            return Path(self.prefix).name == Path(other.prefix).name
        return self.bin_sha256 == other.bin_sha256


class ContinuedDatasets(Generic[T_co]):
    """Training samples of a run: one dataset, or a blend of several."""

    def __init__(
        self, records: Sequence[DatasetRecord], datasets: Sequence[Numbered[T_co]], folder: Path | None = None
    ) -> None:
        """Start at the beginning of each of ``datasets``.

        Args:
            records: record of each dataset; the shares are positive and add up to 1.
            datasets: one or more datasets.
            folder: cache folder of the blend order; None: no cache.
        """
        self._records = tuple(records)
        self._datasets = tuple(datasets)
        self._left_out: tuple[DatasetRecord, ...] = ()
        self._first = 0
        self._folder = folder
        self._order = self._order_of(self._records)

    def _order_of(self, records: Sequence[DatasetRecord]) -> BlendOrder | None:
        if len(records) < 2:
            return None
        return BlendOrder([record.share for record in records], self._folder)

    def sample(self, number: int) -> T_co:
        """Read sample ``number`` of the run, which must not precede the sample resumed from."""
        place = number - self._first
        assert place >= 0, (number, self._first)
        which, within = self._order.place(place) if self._order is not None else (0, place)
        return self._datasets[which].sample(self._records[which].drawn + within)

    def windows(self, numbers: Numbers) -> Tokens:
        """Read the windows of ascending ``numbers``: [N, S + 1]."""
        places = numbers - self._first
        assert places[0] >= 0, (numbers[0], self._first)
        if self._order is None:
            return read_windows(self._datasets[0], places + self._records[0].drawn)
        which, within = self._order.places(places)
        return read_blended(self._datasets, which, within + np.array([record.drawn for record in self._records])[which])

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint, constant during an attempt."""
        return {"first": self._first, "datasets": [asdict(record) for record in self._records + self._left_out]}

    def restore(self, state: Mapping[str, Any], consumed_samples: int) -> str | None:
        """Resume from the state of a checkpoint that was written after ``consumed_samples``.

        Returns:
            The changes, in one line; None: no change.

        Raises:
            DataError: a dataset that is still in the blend now has another sample order or other tokens, or the state
                is damaged.
        """
        if "datasets" not in state:
            self._first = consumed_samples
            former = "hooks.dataset_function" if "hook" in state else "streamed text"
            return f"data: the checkpoint was trained on {former}; these datasets are read from their beginning"
        first, before = _read_state(state, consumed_samples)
        found = _matches(self._records, before)
        active = [place for place, record in enumerate(before) if record.share]
        # The same datasets with the same shares: the blend goes on where it stopped, sample by sample.
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
        # A dataset that comes back later goes on after the samples that were drawn from it.
        self._left_out = tuple(replace(one, share=0.0) for place, one in enumerate(before) if place not in still_there)
        self._records = tuple(
            record if place is None else replace(record, drawn=before[place].drawn)
            for record, place in zip(self._records, found, strict=True)
        )
        return line

    def _drawn_by(self, before: list[DatasetRecord], active: list[int], number: int) -> list[DatasetRecord]:
        """``before`` with the samples drawn from each dataset at sample ``number``."""
        order = self._order_of([before[place] for place in active])
        counts = [number] if order is None else order.counts(number).tolist()
        drawn = dict(zip(active, counts, strict=True))
        return [replace(record, drawn=record.drawn + drawn.get(place, 0)) for place, record in enumerate(before)]


def end_of_documents(state: Mapping[str, Any] | None) -> int | None:
    """End-of-document token of the checkpoint's latest blend; None: unknown or ambiguous.

    Generation stops at this token, whatever token the current tokenizer names.
    """
    datasets = [] if state is None else state.get("datasets", [])
    ends = {entry.get("eod") for entry in datasets if entry.get("share")}
    return ends.pop() if len(ends) == 1 else None


def _read_state(state: Mapping[str, Any], consumed_samples: int) -> tuple[int, list[DatasetRecord]]:
    """Parse ``state``: the sample at which its blend began, and its datasets.

    Raises:
        DataError: the state is damaged or from another version.
    """
    try:
        entries = [{**entry, "sequences": tuple(entry["sequences"])} for entry in state["datasets"]]
        first, records = int(state["first"]), [DatasetRecord(**entry) for entry in entries]
        if not (0 <= first <= consumed_samples and all(map(_can_be, records)) and any(one.share for one in records)):
            raise ValueError(f"sample {first:,} of {consumed_samples:,}, {len(records):,} datasets")
        return first, records
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"data: the checkpoint's data position is damaged or from another version ({error}); resume with the "
            "version that wrote it, or start a new run from the weights with checkpoint.load and checkpoint.finetune"
        ) from None


def _can_be(record: DatasetRecord) -> bool:
    """True if the record is valid; raises TypeError if a number has another type."""
    first, end = record.sequences
    has_names = isinstance(record.prefix, str) and isinstance(record.lengths, str)
    return has_names and 0 <= first <= end and 0 <= record.share <= 1 and 0 <= record.drawn < _MOST_DRAWN


def _matches(records: Sequence[DatasetRecord], before: Sequence[DatasetRecord]) -> list[int | None]:
    """Find each of ``records`` in ``before``; None: a new dataset.

    Blends have thousands of datasets.

    Raises:
        DataError: a dataset is there, but its tokens or its order have changed.
    """
    found: list[int | None] = []
    # Places not matched yet.
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
                f"{record.prefix}: was prepared again after the checkpoint was written, so that the position in the "
                "data no longer applies; restore the former files, or give the new ones another prefix"
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
            f"{key}: the checkpoint was trained on {record.prefix} with {then}, but this run has {now}, which changes "
            "the order of the samples; restore the former value, or start a new run from the weights with "
            "checkpoint.load and checkpoint.finetune"
        )


def _line(
    records: Sequence[DatasetRecord], before: Sequence[DatasetRecord], found: Sequence[int | None], consumed: int
) -> str:
    """Line about the changes from ``before`` to ``records``."""
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
    changes = "; ".join(part for part in parts if part) or "the datasets are in another order"
    position = "former datasets continue at their position" if kept else "all datasets are read from their beginning"
    return f"data: the blend changes at sample {consumed:,} ({changes}); {position}"


def _named(text: str, names: Sequence[str]) -> str | None:
    if not names:
        return None
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return text.format(", ".join(names[:MAX_NAMED]) + more)
