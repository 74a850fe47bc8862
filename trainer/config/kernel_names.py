"""Names of the op backends. Torch-free; imports no other module of the trainer."""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["native", "torch", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
"""In the order of preference of ``auto``; see trainer.ops.operation."""

BackendChoice = Literal["auto", "native", "torch", "reference"]
