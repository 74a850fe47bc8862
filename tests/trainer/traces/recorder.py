"""Records what a step asks of a device that is not there: operations, waits of the host, collectives and memory.

Only the front of each operation runs, on fake tensors. An operation of csrc/ has no such front: its CPU kernel runs
once for each set of shapes, to learn those of the results.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

ROOT = Path(__file__).parents[3]
CUDA = torch.device("cuda", 0)
_COPIES = {"aten._to_copy.default", "aten.copy_.default"}
_READS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.masked_select.default"}
_MEMORY_ONLY = {
    *("aten.empty.memory_format", "aten.empty_like.default", "aten.empty_strided.default", "aten.new_empty.default"),
    *("aten.new_empty_strided.default", "aten.lift_fresh.default", "aten._unsafe_view.default"),
}


@dataclass
class Record:
    """Requests of one step to the device.

    Attributes:
        launches: name of the operation -> calls with a kernel; views and allocations are not among them.
        waits: places in trainer/ where the host waits for the device, with what for -> how often.
        collectives: group of ranks -> its collectives in order, with their sizes.
        before: bytes on the device before the step.
        peak: most bytes during the step.
    """

    launches: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)
    collectives: dict[tuple[int, ...], list[str]] = field(default_factory=dict)
    before: int = 0
    peak: int = 0


class Memory:
    """Bytes of the storages that live on the device."""

    def __init__(self) -> None:
        self.now, self.peak = 0, 0
        self._known: dict[int, weakref.ref] = {}
        self._sizes: dict[int, int] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor until its end."""
        if tensor.device.type != "cuda":
            return
        # The storage of a DTensor has the size of the whole; its shard has its own.
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._count(key, storage.nbytes())

    @contextmanager
    def following_sizes(self) -> Iterator[None]:
        """Follow storages that are given back and taken again, as fully_shard does with gathered weights."""
        of_torch = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = of_torch(storage, size)
            if storage._cdata in self._known:
                self._count(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize_
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = of_torch

    def _count(self, key: int, size: int) -> None:
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._known[key]


class Recorder(TorchDispatchMode):
    """Records operations on fake tensors within a ``with`` block."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.record = Record()
        self._memory = memory
        self._results: dict[object, object] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Record one operation, and make its results."""
        kwargs = kwargs or {}
        name = str(func)
        if name in _READS:
            self._note_wait(name)
        if func.namespace == "c10d":
            self._note_collective(name, args, kwargs)
        if name in _COPIES:
            self._note_copy(name, args, kwargs)
        if name == "aten._local_scalar_dense.default":
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func.namespace == "llmctl":
            results = self._native(func, args, kwargs)
        elif name == "aten.addmm.dtype_out":
            results = kwargs["out"]  # torch's decomposition of it takes no dtype
        else:
            results = func(*args, **kwargs)
        if (
            not func.is_view
            and name not in _MEMORY_ONLY
            and func.namespace in ("aten", "llmctl")
            and _is_on_device(results, args)
        ):
            self.record.launches[name] += 1
        tree_map_only(torch.Tensor, self._memory.note, results)
        return results

    def _native(self, func, args, kwargs):
        """Results of an operation of csrc/, of the shapes and dtypes that its CPU kernel gives."""
        if not func._schema.returns:
            return None
        leaves, _ = tree_flatten((args, kwargs))
        key = (func, *(_Form.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))
        if key not in self._results:
            with _disable_current_modes():
                given = [_stand_in(one) for one in args]
                self._results[key] = tree_map_only(torch.Tensor, _Form.of, func(*given, **kwargs))
        return tree_map_only(_Form, _Form.empty, self._results[key])

    def _note_wait(self, what: str) -> None:
        self.record.waits[f"{_place()}: {what}"] += 1

    def _note_copy(self, name, args, kwargs) -> None:
        source = args[1] if name == "aten.copy_.default" else args[0]
        target = args[0].device if name == "aten.copy_.default" else torch.device(kwargs.get("device") or source.device)
        is_free = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if source.device.type != target.type and not is_free:
            self._note_wait(f"copy from {source.device.type} to {target.type}")

    def _note_collective(self, name, args, kwargs) -> None:
        leaves, _ = tree_flatten((args, kwargs))
        groups = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
        ranks = next((_ranks_of(group) for group in groups if _ranks_of(group)), ())
        sizes = [str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.record.collectives.setdefault(ranks, []).append(f"{name} {' '.join(sizes)}")


@dataclass(frozen=True)
class _Form:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=CUDA)

    def zeros(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).zero_()


def _stand_in(value: object) -> object:
    """Zeros of the same form. A result for a list of tensors does not depend on their sizes."""
    if isinstance(value, torch.Tensor):
        return _Form.of(value).zeros()
    if isinstance(value, (list, tuple)):
        return [torch.zeros(1, dtype=one.dtype) if isinstance(one, torch.Tensor) else one for one in value]
    return value


def _is_on_device(results: object, args: object) -> bool:
    leaves, _ = tree_flatten((results, args))
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda" for leaf in leaves)


def _ranks_of(group: torch.ScriptObject) -> tuple[int, ...]:
    try:
        unboxed = torch.distributed.ProcessGroup.unbox(group)
    except RuntimeError:
        return ()
    return tuple(torch.distributed.get_process_group_ranks(unboxed))


def _place() -> str:
    """The innermost line of trainer/ on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "trainer"):
            return f"{path.relative_to(ROOT)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
