"""GgufFile: a GGUF file opened as one of our models. Needs the package gguf.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Order of the rows of query and key:
github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.families.catalogue import read_model
from trainer.hub.errors import HubError
from trainer.hub.gguf.keys import ROPE_FACTORS, architecture_of, config_keys
from trainer.hub.gguf.tokenizer import TokenizerFiles, tokenizer_files
from trainer.hub.published import PublishedModel
from trainer.hub.quantized import StoredAs

_MAGIC = b"GGUF"
_PLAIN = ("F32", "F16", "BF16")
_HEADS = re.compile(r"\.self_attn\.([qk])_proj\.")


def is_gguf_file(path: Path) -> bool:
    """True if ``path`` is a GGUF file, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class GgufFile(PublishedModel):
    """An open file. Quantised tensors are read as float32, and all others in their own dtype.

    A model that has matrices of several types is read in float32 as a whole.
    """

    def __init__(self, path: Path):
        """Open the file and check its keys and tensors.

        Raises:
            HubError: the package gguf is missing; the file is damaged; a key, or a type of tensors, cannot be read; or
                a tensor is missing, left over, or has a wrong shape.
            FamilyError: the keys describe no model of a known family.
        """
        metadata, self._tensors = _open(path)
        self._row = architecture_of(metadata, str(path))
        shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()}
        self._shapes = shapes
        factors = self._tensors.pop(ROPE_FACTORS, None)
        keys = config_keys(metadata, shapes, None if factors is None else factors.data.tolist(), str(path))
        self._tokenizer: TokenizerFiles = tokenizer_files(metadata, keys["vocab_size"])
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
            used.get(name, name): StoredAs("", self._stored_dtype(tensor), self._shapes[name])
            for name, tensor in self._tensors.items()
        }

    def read_stored(self, name: str, expert: int | None) -> Tensor:
        """See PublishedModel. Dequantised, its rows in the order of Hugging Face, in new memory."""
        import gguf

        assert expert is None, "no architecture with experts is read"
        stored, tensor = self._stored[name], self._tensors[self._theirs[name]]
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(stored.shape)
        heads = _HEADS.search(name)
        if heads and self._row.permutes_heads:
            values = _undo_permutation(values, self.keys[_COUNT[heads.group(1)]])
        return torch.from_numpy(values).to(_TORCH[stored.dtype])

    def release(self) -> None:
        """See PublishedModel. The package keeps its map, whose pages the system can drop."""

    def _dtype_of_matrices(self, path: Path) -> str:
        kinds = {tensor.tensor_type.name for tensor in self._tensors.values() if len(tensor.shape) > 1}
        for kind in sorted(kinds - set(_PLAIN)):
            _check_type(path, next(t for t in self._tensors.values() if t.tensor_type.name == kind))
        [only] = kinds if len(kinds) == 1 else ["F32"]
        return only if only in _PLAIN else "F32"

    def _stored_dtype(self, tensor: Any) -> str:
        return self._dtype if len(tensor.shape) > 1 else "F32"


_COUNT = {"q": "num_attention_heads", "k": "num_key_value_heads"}
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _undo_permutation(
    values: np.ndarray[Any, np.dtype[np.float32]], heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows [heads, pairs, 2] -> [heads, 2, pairs]: from neighbouring pairs of rope to Hugging Face's two halves."""
    rows, *rest = values.shape
    return np.ascontiguousarray(values.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest))


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys and tensors of the file.

    Raises:
        HubError: the package is missing, or the file cannot be read.
    """
    if find_spec("gguf") is None:
        raise HubError(f"{path}: needs the package gguf; install it: pip install gguf")
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: _value(field) for name, field in reader.fields.items()}
    except OSError as error:
        raise HubError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise HubError(f"{path}: is cut or damaged: {error}") from None
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _value(field: Any) -> Any:
    value = field.contents()
    # A float32 of the file is meant as the shortest decimal that reads as this float32: 1e-05, not 9.99999974e-06.
    return float(str(field.parts[-1][0])) if isinstance(value, float) else value


def _check_type(path: Path, tensor: Any) -> None:
    import gguf

    try:
        gguf.dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError:
        raise HubError(
            f"{path}: {tensor.name} has the type {tensor.tensor_type.name}, which the package gguf cannot dequantise; "
            "take another file of the model, such as Q8_0 or F16"
        ) from None
