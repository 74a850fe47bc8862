"""Facts that each rank measures in the preflight, as plain values for the store. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

_NUMBERS = ("speed", "memory_free", "memory_total", "host_memory_free", "clock")
_COUNTS = ("devices", "devices_asked")


@dataclass(frozen=True)
class FolderFacts:
    """A folder that this node must be able to write.

    Attributes:
        name: ``run directory`` or ``checkpoint folder``.
        path: of the folder.
        problem: the system's words on a write that failed; empty if the file was written and read back.
        is_full: True if the write failed because of a full disk or a used-up quota.
        free: bytes that a user may still write to its file system; None if unknown.
    """

    name: str
    path: str
    problem: str = ""
    is_full: bool = False
    free: float | None = None


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank. A number that is None could not be measured.

    Attributes:
        rank: the rank.
        host: name of its machine.
        local_rank: its number on its node.
        device: name of its device; ranks with equal names are compared.
        is_gpu: True for a GPU.
        devices: number of devices that the rank finds on its node.
        devices_asked: number of devices that the job has asked for on each node.
        speed: of a matrix product, in FLOP/s.
        memory_free: bytes of the GPU that are free.
        memory_total: bytes of the GPU.
        host_memory_free: bytes of the node that are available.
        clock: seconds since 1970 at the moment at which rank 0 asked all ranks.
        folders: those that the rank has tried to write.
        broken: words on an error that the device itself reports, and that needs a repair; empty without one.
        worn: words on an error that the device has survived; empty without one.
        problem: words on a measurement that failed as a whole; empty otherwise.
    """

    rank: int
    host: str
    local_rank: int = 0
    device: str = ""
    is_gpu: bool = False
    devices: int | None = None
    devices_asked: int | None = None
    speed: float | None = None
    memory_free: float | None = None
    memory_total: float | None = None
    host_memory_free: float | None = None
    clock: float | None = None
    folders: tuple[FolderFacts, ...] = ()
    broken: str = ""
    worn: str = ""
    problem: str = ""

    def as_text(self) -> str:
        """The facts as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes, rank: int) -> RankFacts | None:
        """Read the facts of ``rank``; None if another program has written them."""
        try:
            values = json.loads(text)
        except ValueError:
            return None
        if not isinstance(values, Mapping) or values.get("rank") != rank or not isinstance(values.get("host"), str):
            return None
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        known["folders"] = tuple(_folders(known.get("folders")))
        return sane(cls(**known))


def sane(facts: RankFacts) -> RankFacts:
    """The facts with None in the place of every number that cannot be one, and texts in the place of words."""
    wrong: dict[str, Any] = {name: None for name in _NUMBERS if not _is_number(getattr(facts, name))}
    wrong.update({name: None for name in _COUNTS if type(getattr(facts, name)) is not int})
    wrong.update(
        {name: str(getattr(facts, name) or "") for name in ("device", "broken", "worn", "problem")},
    )
    return replace(facts, **wrong)


def _number(value: Any) -> float | None:
    return value if _is_number(value) else None


def _is_number(value: object) -> bool:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def _folders(values: object) -> list[FolderFacts]:
    found = []
    for each in values if isinstance(values, Sequence) and not isinstance(values, str) else ():
        if isinstance(each, Mapping) and isinstance(each.get("name"), str):
            name, path, problem = (str(each.get(key, "")) for key in ("name", "path", "problem"))
            found.append(FolderFacts(name, path, problem, each.get("is_full") is True, _number(each.get("free"))))
    return found


def nodes_of(facts: Sequence[RankFacts]) -> dict[int, int]:
    """Rank -> number of its node, from 0 on in the order of the first ranks.

    A machine holds several nodes of a job where several of its ranks have the same local rank.
    """
    seen: dict[tuple[str, int], int] = {}
    numbers: dict[tuple[str, int], int] = {}
    found = {}
    for each in sorted(facts, key=lambda one: one.rank):
        place = each.host, each.local_rank
        key = each.host, seen.get(place, 0)
        seen[place] = key[1] + 1
        found[each.rank] = numbers.setdefault(key, len(numbers))
    return found
