"""The names of operations and backends, as the config and the command line have them. Torch-free."""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["own", "nvrtc", "triton", "torch", "eager"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
"""In the order in which ``auto`` takes them: see trainer.kernels.operation."""

COMPILED = "compiled"
"""What the bench calls torch.compile: no backend of a run, but what our own code for GPUs is held against."""

BackendChoice = Literal["auto", "own", "nvrtc", "triton", "torch", "eager"]
