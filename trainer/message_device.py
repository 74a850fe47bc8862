"""Where a tensor has to lie so that a backend can send it to one other rank."""

from __future__ import annotations

import torch
import torch.distributed as dist


def message_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """The device to send from and to receive on, for tensors of ``device``: their own wherever that is possible.

    Gloo's send and receive read host memory by its address; its collectives take the way through the host by
    themselves.
    """
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device
