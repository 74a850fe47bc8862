"""Tuning results: benchmark measurements of GPUs, and the resulting order for ``auto``. Torch-free.

The files are kept beside the build cache. The native kernels come first unless another backend measured faster: see
``rank``. Without measurements of the same kind of GPU and the same sources the order of BACKENDS applies.
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

LARGE_BYTES = 1 << 26
"""Calls that move fewer bytes measure call overhead instead of the kernel."""
_NATIVE: tuple[Backend, ...] = ("native", "nvrtc")
_CPU_FOLDERS = {"cpu", "data"}
_CPU_FILE = "cpu.cpp"
"""Folders and file names of csrc/ that no GPU kernel and no launch depends on."""
_WORDS = ("device", "dtype", "operation", "size", "backend", "problem")
_NUMBERS = ("seconds", "gb_per_s", "of_copy")
_KEPT = (*_WORDS, *_NUMBERS)

Rows = Sequence[Mapping[str, Any]]
"""Measurements, with the fields of trainer.ops.tools.bench.Measurement."""


@dataclass(frozen=True)
class Ranking:
    """Order in which ``auto`` tries the backends of one operation in one dtype.

    Attributes:
        order: all of BACKENDS, best first.
        reasons: backend -> reason for its move behind a backend that follows it in BACKENDS.
    """

    order: tuple[Backend, ...]
    reasons: Mapping[Backend, str]


_OfSize = Mapping[str, Mapping[str, Any]]
"""Backend -> its measurement."""
Rankings = Mapping[tuple[str, str], Ranking]
"""(Operation, dtype) -> ranking, for measured operations."""


def rank(rows: Rows) -> Ranking | None:
    """Rank the backends of one operation in one dtype; None without enough measurements.

    The native kernels come first if no other backend is faster at a large size. Otherwise they come last: both are
    compiled from the same source, so one of them speaks for the other. The other backends are sorted by time.

    Args:
        rows: measurements on one GPU, forward and backward.
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
            reasons[name] = failing[late[0]] or ""
        elif ahead:
            how = f"found {ahead[0]} faster" if name in there else f"measured {ahead[0]} here, but not {name}"
            reasons[name] = f"the benchmark {how}"
    return Ranking(order, reasons)


def _failing(own: Backend, others: Sequence[Backend], sizes: Iterable[_OfSize]) -> str | None:
    """The backend that is faster than a native one, as a reason; None if there is none."""
    for of_size in sizes:
        best = min(others, key=lambda name: of_size[name]["seconds"])
        if of_size[best]["seconds"] < of_size[own]["seconds"]:
            return f"the benchmark found {best} faster"
    return None


@dataclass(frozen=True)
class TuningResults:
    """Measurements of one kind of GPU with one version of torch.

    Attributes:
        path: file of the measurements.
    """

    path: Path

    @classmethod
    def of(cls, cache: Path, gpu: str, torch: str) -> TuningResults:
        """Tuning results in the user's cache.

        Args:
            cache: the user's cache folder.
            gpu: name of the GPU as the driver reports it.
            torch: version of torch.
        """
        name = re.sub(r"[^A-Za-z0-9.+]+", "-", f"{gpu}-torch-{torch}")
        return cls(BuildCache.below(cache).shared / "measured" / f"{name}.json")

    def text(self) -> str:
        """Text of the file; empty if the file cannot be read."""
        with suppress(OSError, ValueError):
            return self.path.read_text(encoding="utf-8")
        return ""

    def keep(self, rows: Rows) -> bool:
        """Replace the measurements of each operation and dtype for which ``rows`` give a ranking.

        Returns:
            True if any measurement was replaced.

        Raises:
            OSError: the file cannot be written.
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
    """Parse the text of a file. Invalid text and other sources give no measurements."""
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        document = json.loads(text)
        rows = document["measurements"]
        if document["sources"] == gpu_sources_key() and all(map(_is_measurement, rows)):
            return list(rows)
    return []


def _is_measurement(row: Any) -> bool:
    """True if a row has the form that ``keep`` writes; users may edit it."""
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in _WORDS)
        and all(isinstance(row.get(name), int | float) for name in _NUMBERS)
    )


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["operation"], row["dtype"]


def rankings_of(rows: Rows) -> Rankings:
    """Rank every operation and dtype that has enough measurements."""
    by_operation: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_operation.setdefault(_key(row), []).append(row)
    ranked = {key: rank(found) for key, found in by_operation.items()}
    return {key: ranking for key, ranking in ranked.items() if ranking is not None}


def gpu_sources_key() -> str:
    """Hash of the sources of the GPU kernels."""
    digest = hashlib.sha256()
    for path in source_files():
        if path.parent.name not in _CPU_FOLDERS and path.name != _CPU_FILE:
            digest.update(f"{path.parent.name}/{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
