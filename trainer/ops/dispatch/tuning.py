"""What the bench measured on GPUs, kept beside what is built, and the order that ``auto`` takes from it. Torch-free.

Our own code for GPUs comes first where it has earned it: ``rank`` has the rule. What has not been measured on a kind of
GPU, or with other sources than these, has no ranking, and the order of BACKENDS holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.kernel_names import BACKENDS, Backend
from trainer.ops.build.build_cache import BuildCache
from trainer.ops.build.sources import source_files

OF_COPY = 0.8
"""The share of a copy's bandwidth that our own code must reach to come first."""
OF_BEST_OTHER = 1.1
"""How many times as fast as the best of the others it must be, too."""
LARGE_BYTES = 1 << 26
"""Calls that move fewer bytes take as long as it takes to call: they say nothing of a kernel."""
_NATIVE: tuple[Backend, ...] = ("native", "nvrtc")
_CPU_FOLDERS = {"cpu", "data"}
_CPU_FILE = "cpu.cpp"
"""Of csrc/: neither kernels for GPUs, nor calls of them, are made of these."""
_WORDS = ("device", "dtype", "operation", "size", "backend", "problem")
_NUMBERS = ("seconds", "gb_per_s", "of_copy")
_KEPT = (*_WORDS, *_NUMBERS)

Rows = Sequence[Mapping[str, Any]]
"""Measurements, with the fields of trainer.ops.tools.bench.Measurement."""


@dataclass(frozen=True)
class Ranking:
    """In which order ``auto`` tries the backends of one operation in one dtype.

    Attributes:
        order: all of BACKENDS.
        reasons: backend -> why it comes after one that it stands before in BACKENDS, in a few words.
    """

    order: tuple[Backend, ...]
    reasons: Mapping[Backend, str]


_OfSize = Mapping[str, Mapping[str, Any]]
"""Backend -> its measurement."""
Rankings = Mapping[tuple[str, str], Ranking]
"""(Operation, dtype) -> its ranking, where there is one."""


def rank(rows: Rows) -> Ranking | None:
    """The ranking of one operation in one dtype; None if too little of it was measured.

    Our own code comes first where at every large size it moves its bytes at OF_COPY of the speed of a copy or more, and
    is OF_BEST_OTHER times as fast as the best of the other backends or more; otherwise last. The other backends go by
    their times.

    Args:
        rows: its measurements on one GPU, forward and backward.
    """
    sizes: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if not row["problem"] and 1e9 * row["gb_per_s"] * row["seconds"] >= LARGE_BYTES:
            of_size = sizes.setdefault(row["size"], {})
            of_size.update({name: row for name in BACKENDS if name == row["backend"]})
    there = [name for name in BACKENDS if sizes and all(name in of_size for of_size in sizes.values())]
    others = [name for name in there if name not in _NATIVE]
    if not others:
        return None
    others.sort(key=lambda name: sum(of_size[name]["seconds"] for of_size in sizes.values()))
    failing = {name: _failing(name, others, sizes.values()) for name in there if name in _NATIVE}
    late = [name for name, problem in failing.items() if problem is not None]
    unmeasured = [name for name in BACKENDS if name not in there and name not in _NATIVE]
    order = (*(name for name in _NATIVE if not late), *others, *unmeasured, *(name for name in _NATIVE if late))
    reasons: dict[Backend, str] = {}
    for place, name in enumerate(order):
        ahead = [other for other in order[:place] if BACKENDS.index(other) > BACKENDS.index(name)]
        if ahead and name in _NATIVE:
            # Both are compiled from one source.
            reasons[name] = failing[late[0]] or ""
        elif ahead:
            how = f"{ahead[0]} to be faster" if name in there else f"{ahead[0]} here, and not this"
            reasons[name] = f"the bench has measured {how}"
    return Ranking(order, reasons)


def _failing(own: Backend, others: Sequence[Backend], sizes: Iterable[_OfSize]) -> str | None:
    """What our own code falls short of."""
    for of_size in sizes:
        if of_size[own]["of_copy"] < OF_COPY:
            return f"the bench has measured it at less than {OF_COPY:.0%} of the speed of a copy"
        times = {name: of_size[name]["seconds"] for name in others}
        best = min(others, key=times.__getitem__)
        if times[best] < OF_BEST_OTHER * of_size[own]["seconds"]:
            return f"the bench has measured it at less than {OF_BEST_OTHER} times the speed of {best}"
    return None


@dataclass(frozen=True)
class TuningResults:
    """The measurements of one kind of GPU, with one version of torch.

    Attributes:
        path: the file.
    """

    path: Path

    @classmethod
    def of(cls, cache: Path, gpu: str, torch: str) -> TuningResults:
        """Where they are kept.

        Args:
            cache: the user's folder of caches.
            gpu: its name, as the driver has it.
            torch: its version.
        """
        name = re.sub(r"[^A-Za-z0-9.+]+", "-", f"{gpu}-torch-{torch}")
        return cls(BuildCache.below(cache).shared / "measured" / f"{name}.json")

    def text(self) -> str:
        """The file as it is; nothing if it cannot be read."""
        with suppress(OSError, ValueError):
            return self.path.read_text(encoding="utf-8")
        return ""

    def keep(self, rows: Rows) -> bool:
        """Put measurements into the place of older ones of the same operations and dtypes, where they give a ranking.

        Returns:
            Whether any did.

        Raises:
            OSError: they cannot be written.
        """
        ranked = rankings_of(rows)
        if not ranked:
            return False
        fresh = [{name: row[name] for name in _KEPT} for row in rows if _key(row) in ranked]
        kept = [row for row in measurements_in(self.text()) if _key(row) not in ranked]
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=".")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"sources": gpu_sources_key(), "measurements": [*kept, *fresh]}, file, indent=1)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return True


def measurements_in(text: str) -> Rows:
    """The measurements in the text of a file; none if it is no such text, or of other sources than these."""
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        document = json.loads(text)
        rows = document["measurements"]
        if document["sources"] == gpu_sources_key() and all(map(_is_measurement, rows)):
            return list(rows)
    return []


def _is_measurement(row: Any) -> bool:
    """Whether it is what ``keep`` writes: it may have been edited, or be of another version."""
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in _WORDS)
        and all(isinstance(row.get(name), int | float) for name in _NUMBERS)
    )


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["operation"], row["dtype"]


def rankings_of(rows: Rows) -> Rankings:
    """The ranking of each operation and dtype that was measured enough."""
    by_operation: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_operation.setdefault(_key(row), []).append(row)
    ranked = {key: rank(found) for key, found in by_operation.items()}
    return {key: ranking for key, ranking in ranked.items() if ranking is not None}


def gpu_sources_key() -> str:
    """What measurements are of: the sources of the kernels for GPUs."""
    digest = hashlib.sha256()
    for path in source_files():
        if path.parent.name not in _CPU_FOLDERS and path.name != _CPU_FILE:
            digest.update(f"{path.parent.name}/{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
