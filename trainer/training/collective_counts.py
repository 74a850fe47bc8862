"""Collectives that this rank has entered, per process group, and the collective that its main thread is in.

torch counts the collectives of each group as they are entered (``ProcessGroup::getSequenceNumberForGroup``, for gloo
and NCCL alike). All members of a group enter the same collectives in the same order, so a member with a smaller number
than the others is the rank that they wait for. Messages of a pipeline count too, and differ between its stages.
"""

from __future__ import annotations

import linecache
import sys
import threading
from contextlib import suppress
from types import FrameType

import torch.distributed as dist
from torch.distributed import c10d_logger, distributed_c10d

from trainer.process.heartbeat import CollectivesEntered
from trainer.training.peer_failure import axis_of_module

WORLD = "world"
_UNNAMED = ("", "undefined")
_DEFAULT_GROUP = "default_pg"
_TORCH = (distributed_c10d.__name__, c10d_logger.__name__)


class CollectiveCounts:
    """Reader of the main thread's collectives, for another thread. Costs microseconds, and never waits."""

    def __init__(self) -> None:
        """Read the main thread's collectives from now on."""
        self._main = threading.main_thread().ident
        self._known: dict[str, tuple[str, int]] = {}

    def read(self) -> CollectivesEntered:
        """The number of collectives entered in each group of this rank, and the collective of this moment."""
        entered: dict[str, tuple[int, int]] = {}
        names: dict[dist.ProcessGroup, str] = {}
        # A copy in one step: the main thread may add or destroy a group meanwhile.
        for group, identity in list(distributed_c10d._world.pg_names.items()):
            with suppress(RuntimeError, ValueError, KeyError):
                name, first = self._name(group, identity)
                names[group] = name
                number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
                entered[name] = (first, number)
        return CollectivesEntered(entered, *self._inside(names))

    @property
    def is_inside(self) -> bool:
        """True if the main thread is in a collective."""
        return bool(self._inside({})[0])

    def _name(self, group: dist.ProcessGroup, identity: str) -> tuple[str, int]:
        """Name and first rank of a group, which identify the group over all ranks."""
        if identity not in self._known:
            word = group.group_desc
            name = WORLD if word == _DEFAULT_GROUP else f"group {identity}" if word in _UNNAMED else word
            if any(name == known for known, _ in self._known.values()):
                name = f"{name} {identity}"
            self._known[identity] = name, min(dist.get_process_group_ranks(group))
        return self._known[identity]

    def _inside(self, names: dict[dist.ProcessGroup, str]) -> tuple[str, str]:
        """Name and group of the collective that the main thread is in; empty outside of any."""
        frame = sys._current_frames().get(self._main) if self._main is not None else None
        if frame is None:
            return "", ""
        name, group = _torch_call(frame, names)
        if name:
            return name, group
        # Work that was started earlier: the wait for its end is a call into C++, without a frame of its own.
        module = frame.f_globals.get("__name__", "")
        axis = axis_of_module(module)
        if axis is None or ".wait(" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            return "", ""
        return "wait", axis


def _torch_call(frame: FrameType, names: dict[dist.ProcessGroup, str]) -> tuple[str, str]:
    """Function of torch.distributed that the innermost frames belong to, and its group; empty for other frames."""
    name, group = "", WORLD
    caller: FrameType | None = frame
    while caller is not None and caller.f_globals.get("__name__") in _TORCH:
        if not caller.f_code.co_name.startswith("_") and caller.f_code.co_name != "wrapper":
            name = caller.f_code.co_name
        given = caller.f_locals.get("group")
        group = names.get(given, "") if isinstance(given, dist.ProcessGroup) else group
        caller = caller.f_back
    return name, group
