"""Which backend a group has, and where a tensor has to lie so that it can be sent to one other rank."""

from __future__ import annotations

import torch
import torch.distributed as dist


def is_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether ``group``, or the default one, communicates through gloo, which has tags and other fast primitives."""
    return bool(dist.get_backend(group) == "gloo")


def message_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """The device to send from and to receive on, for tensors of ``device``: their own wherever that is possible.

    Gloo's send and receive read host memory by its address; its collectives take the way through the host by
    themselves.
    """
    return torch.device("cpu") if is_gloo(group) else device
