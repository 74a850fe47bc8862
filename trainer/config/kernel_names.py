"""The names of backends. Torch-free and without imports, because the sections of the config name them."""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["native", "nvrtc", "compile", "torch", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
"""In the order in which ``auto`` takes them: see trainer.ops.operation."""

BackendChoice = Literal["auto", "native", "nvrtc", "compile", "torch", "reference"]
