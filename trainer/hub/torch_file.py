"""Weights in a file of torch.save, as older Hugging Face folders have them (pytorch_model.bin).

Such files are pickles. torch.load makes only tensors and plain values of them (weights_only), so that a file from
elsewhere cannot run code: https://docs.pytorch.org/docs/stable/notes/serialization.html.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.hub.errors import HubError
from trainer.hub.tensor_file import DTYPE_NAMES


class TorchFile:
    """An open file, with the methods of safetensors' safe_open that readers here need.

    Its tensors are in mapped memory; in new memory if torch before 1.6 wrote the file, which cannot be mapped.
    """

    def __init__(self, path: Path):
        """Map the file.

        Raises:
            OSError: the file is missing or cannot be read.
            HubError: the file is damaged, or holds something else than tensors by name.
        """
        self._path = path
        found = self._load()
        if not isinstance(found, dict) or not found or not all(isinstance(t, Tensor) for t in found.values()):
            raise HubError(f"{path}: is not a table of tensors by name, as a Hugging Face folder has it")
        self._tensors: dict[str, Tensor] = found

    def keys(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of a tensor, the dtype by safetensors' name."""
        tensor = self._tensors[name]
        return DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)

    def get_tensor(self, name: str) -> Tensor:
        """The tensor ``name``."""
        return self._tensors[name].detach()

    def get_slice(self, name: str) -> Tensor:
        """The tensor ``name``, to be cut: an index of it is a view."""
        return self.get_tensor(name)

    def _load(self) -> Any:
        # torch answers a damaged file with any of these.
        damage = (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError)
        try:
            # A zip file is what torch.save writes since 1.6.
            with self._path.open("rb") as file:
                can_map = file.read(2) == b"PK"
            return torch.load(self._path, map_location="cpu", weights_only=True, mmap=can_map)
        except (*damage, RuntimeError) as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise HubError(f"{self._path}: is cut or damaged, or holds more than tensors: {first}") from None
