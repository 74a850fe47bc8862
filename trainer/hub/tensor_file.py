"""Safetensors files written tensor by tensor, in bounded memory (https://huggingface.co/docs/safetensors#format)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

# The format asks for a header padded to 8 bytes, so that every tensor can be mapped in place.
_HEADER_ALIGNMENT = 8

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes of weights, by safetensors' names."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Planned(NamedTuple):
    """A tensor that a file will hold.

    Attributes:
        name: its key in the file.
        dtype: its dtype.
        shape: its shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor's data."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class TensorFile:
    """A file whose header is written first; its tensors follow in the planned order, each as a whole or in runs."""

    def __init__(self, path: Path, planned: Sequence[Planned], metadata: Mapping[str, str]):
        """Write the header.

        Raises:
            OSError: the file cannot be written.
        """
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        for tensor in planned:
            begin, end = end, end + tensor.bytes
            header[tensor.name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self.bytes = 8 + len(text) + end
        """Size of the whole file."""

    def write(self, tensor: Tensor) -> None:
        """Append a tensor's elements.

        Raises:
            OSError: the disk is full, or writing fails.
        """
        if tensor.numel():
            self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                assert self._file.tell() == self.bytes, "the tensors differ from the header"
        finally:
            self._file.close()
