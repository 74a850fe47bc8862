"""GgufFile: a GGUF file opened as one of our models. Needs the package gguf.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Order of the rows of query and key:
github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.families.catalogue import read_model
from trainer.families.gguf.header import GgufTensor, read_local_header
from trainer.families.gguf.keys import ROPE_FACTORS, architecture_of, published_keys
from trainer.families.gguf.tokenizer import TokenizerFiles, tokenizer_files
from trainer.hub.errors import HubError
from trainer.hub.published import PublishedModel
from trainer.hub.quantized import StoredAs

_PLAIN = ("F32", "F16", "BF16")
_HEADS = re.compile(r"\.self_attn\.([qk])_proj\.")


class GgufFile(PublishedModel):
    """An open file. Quantised tensors are read as float32, and all others in their own dtype.

    A model that has matrices of several types is read in float32 as a whole.
    """

    def __init__(self, path: Path):
        """Open the file and check its keys and tensors.

        Raises:
            HubError: the package gguf is missing; the file is cut; a type of tensors cannot be read; or a tensor is
                missing, left over, or has a wrong shape.
            FamilyError: the header is damaged, a key cannot be read, or the keys describe no model of a known family.
        """
        if find_spec("gguf") is None:
            raise HubError(f"{path}: needs the package gguf; install it: pip install gguf")
        header, where = read_local_header(path), str(path)
        self._row = architecture_of(header.metadata, where)
        self._bytes = _map(path)
        keys = published_keys(header, where, lambda offset, limit: self._bytes[offset : offset + limit].tobytes())
        self._tokenizer: TokenizerFiles = tokenizer_files(header.metadata, keys["vocab_size"])
        self._tensors = {name: tensor for name, tensor in header.tensors.items() if name != ROPE_FACTORS}
        self._kinds = {name: _kind(path, name, tensor) for name, tensor in self._tensors.items()}
        for name in self._tensors:
            self._stored_bytes(path, name)
        self._dtype = self._dtype_of_matrices(path)
        super().__init__(path, keys, str(path))

    @property
    def files(self) -> list[Path]:
        """The file."""
        return [self.path]

    @property
    def side_files(self) -> Collection[str]:
        """See PublishedModel."""
        return ["config.json", *self._tokenizer.files]

    @property
    def notes(self) -> list[str]:
        """See PublishedModel; and one sentence on a tokenizer that cannot be written."""
        return [*super().notes, *(f"{self.path}: {note}" for note in self._tokenizer.notes)]

    def write_side_files(self, target: Path) -> None:
        """Write config.json and the tokenizer.

        Raises:
            OSError: a file cannot be written.
        """
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(self.keys, indent=2) + "\n", encoding="utf-8")
        for name, content in self._tokenizer.files.items():
            (target / name).write_bytes(content)

    def read_headers(self) -> dict[str, StoredAs]:
        """See PublishedModel. A tensor without a name of Hugging Face keeps its own."""
        import gguf

        _, model = read_model(self.keys, self.where)
        wanted = [name for rule in self.family.weights(model) for name in rule.theirs]
        architecture = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == self._row.name)
        names = gguf.get_tensor_name_map(architecture, self.keys["num_hidden_layers"])
        self._theirs: dict[str, str] = {}
        for name in wanted:
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if stored not in self._tensors:
                raise HubError(f"{self.path}: has no tensor {stored or name}, which a {self.family.name} has")
            self._theirs[name] = stored
        used = {stored: name for name, stored in self._theirs.items()}
        return {
            used.get(name, name): StoredAs("", self._stored_dtype(tensor), tensor.shape)
            for name, tensor in self._tensors.items()
        }

    def read_stored(self, name: str, expert: int | None) -> Tensor:
        """See PublishedModel. Dequantised, its rows in the order of Hugging Face, in new memory."""
        import gguf

        assert expert is None, "no architecture with experts is read"
        stored, tensor = self._stored[name], self._theirs[name]
        content = self._stored_bytes(self.path, tensor)
        values = np.array(gguf.dequantize(content, self._kinds[tensor]), np.float32).reshape(stored.shape)
        heads = _HEADS.search(name)
        if heads and self._row.permutes_heads:
            values = _undo_permutation(values, self.keys[_COUNT[heads.group(1)]])
        return torch.from_numpy(values).to(_TORCH[stored.dtype])

    def release(self) -> None:
        """See PublishedModel. The file stays mapped: the system can drop its pages."""

    def _stored_bytes(self, path: Path, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Bytes of a tensor in mapped memory, in rows.

        Raises:
            HubError: the file ends before, or a row has no whole number of blocks.
        """
        import gguf

        tensor = self._tensors[name]
        try:
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, self._kinds[name])
        except ValueError as error:
            raise HubError(f"{path}: is cut or damaged: {name}: {error}") from None
        end = tensor.offset + math.prod(shape)
        if end > len(self._bytes):
            raise HubError(f"{path}: is cut or damaged: {name} ends at byte {end}, the file at {len(self._bytes)}")
        return self._bytes[tensor.offset : end].reshape(shape)

    def _dtype_of_matrices(self, path: Path) -> str:
        kinds = {self._kinds[name].name: name for name, tensor in self._tensors.items() if len(tensor.shape) > 1}
        for kind in sorted(kinds.keys() - set(_PLAIN)):
            self._check_type(path, kinds[kind])
        [only] = kinds if len(kinds) == 1 else ["F32"]
        return only if only in _PLAIN else "F32"

    def _check_type(self, path: Path, name: str) -> None:
        import gguf

        try:
            gguf.dequantize(self._stored_bytes(path, name)[:1], self._kinds[name])
        except NotImplementedError:
            raise HubError(
                f"{path}: {name} has the type {self._kinds[name].name}, which the package gguf cannot dequantise; "
                "take another file of the model, such as Q8_0 or F16"
            ) from None

    def _stored_dtype(self, tensor: GgufTensor) -> str:
        return self._dtype if len(tensor.shape) > 1 else "F32"


_COUNT = {"q": "num_attention_heads", "k": "num_key_value_heads"}
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _undo_permutation(
    values: np.ndarray[Any, np.dtype[np.float32]], heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows [heads, pairs, 2] -> [heads, 2, pairs]: from neighbouring pairs of rope to Hugging Face's two halves."""
    rows, *rest = values.shape
    return np.ascontiguousarray(values.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest))


def _map(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        return np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise HubError(f"{path}: cannot be read: {error.strerror or error}") from None


def _kind(path: Path, name: str, tensor: GgufTensor) -> Any:
    """The package's type of a tensor's elements."""
    import gguf

    try:
        return gguf.GGMLQuantizationType(tensor.kind)
    except ValueError:
        raise HubError(
            f"{path}: {name} has the type {tensor.kind}, which the package gguf does not know; update it, or take "
            "another file of the model, such as Q8_0 or F16"
        ) from None
