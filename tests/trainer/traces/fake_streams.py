"""Streams and events of a CUDA device that is not there, for fully_shard: nothing is ever late on them."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes


class Event:
    """Over at once."""

    def __init__(self, *_: object, **__: object) -> None:
        """As torch.cuda.Event."""

    def record(self, *_: object) -> None:
        """As torch.cuda.Event."""

    def wait(self, *_: object) -> None:
        """As torch.cuda.Event."""


class Stream:
    """Never has anything to do. The host may not wait for a stream, so that there is no synchronize."""

    def __init__(self, *_: object, **__: object) -> None:
        """As torch.cuda.Stream."""

    def wait_stream(self, *_: object) -> None:
        """As torch.cuda.Stream."""

    def wait_event(self, *_: object) -> None:
        """As torch.cuda.Stream."""

    def record_event(self, event: Event | None = None) -> Event:
        """As torch.cuda.Stream."""
        return event or Event()


def set_up() -> None:
    """Replace torch's streams, events and device numbers in this process.

    A mesh is made of real tensors, whose numbers it reads, also while a model is built of fake ones.
    """
    stream, from_group = Stream(), DeviceMesh.from_group

    def mesh_of(*args, **kwargs):
        with _disable_current_modes():
            return from_group(*args, **kwargs)

    DeviceMesh.from_group = staticmethod(mesh_of)
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda *_: nullcontext()
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.Tensor.record_stream = lambda *_: None
