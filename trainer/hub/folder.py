"""HubFolder: a Hugging Face folder opened as one of our models. Reads single tensors from mapped memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.families.format.errors import FamilyError
from trainer.families.format.quantization import CONFIG_KEY
from trainer.hub.errors import HubError
from trainer.hub.published import Piece, PublishedModel
from trainer.hub.quantized import StoredAs, see_through
from trainer.hub.side_files import copy_side_files
from trainer.hub.torch_file import TorchFile

CONFIG = "config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_TORCH_INDEX, _TORCH_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
# Names of the parameters of norms that old files have, as transformers renames them.
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_OTHER_WEIGHTS = {
    "adapter_model.*": "an adapter (LoRA); merge it into its model and save that",
    "consolidated.*": "in the format of the model's own code; take the folder that transformers reads",
    "*.distcp": "of torch.distributed.checkpoint; let the program that wrote it save safetensors",
    "tf_model.h5": "for TensorFlow; let transformers 4 load it with from_tf=True and save it",
    "flax_model.msgpack": "for Flax; let transformers 4 load it with from_flax=True and save it",
}
"""Files of weights that are not read -> what they are, and what to do."""


def is_hub_folder(path: Path) -> bool:
    """True if ``path`` is a folder in Hugging Face's format, by its config.json."""
    try:
        return "model_type" in json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


class HubFolder(PublishedModel):
    """An open folder. Every tensor of the model is there, with the right shape, and no other."""

    def __init__(self, path: Path, *, may_lack_heads: bool = False, drops_prediction_layers: bool = False):
        """Open the folder and check its config, index and headers.

        Args:
            path: the folder.
            may_lack_heads: see PublishedModel.
            drops_prediction_layers: see PublishedModel.

        Raises:
            HubError: a file is missing or damaged, or a tensor is missing, left over, or has a wrong shape or dtype.
            FamilyError: the config is of an unknown family, or has a key whose meaning is unknown.
        """
        self._files: dict[str, Any] = {}
        keys = _read_json(path / CONFIG)
        self._quantization = keys.pop(CONFIG_KEY, None)
        super().__init__(
            path,
            keys,
            str(path / CONFIG),
            may_lack_heads=may_lack_heads,
            drops_prediction_layers=drops_prediction_layers,
        )

    @property
    def files(self) -> list[Path]:
        """All files of the folder."""
        return sorted(entry for entry in self.path.iterdir() if entry.is_file())

    @property
    def side_files(self) -> Collection[str]:
        """See PublishedModel."""
        return [entry.name for entry in self.files]

    @property
    def notes(self) -> list[str]:
        """See PublishedModel; and one sentence on other parts of the files."""
        found = super().notes
        if self.wrapped_in is not None:
            found.append(
                f"{self.path}: holds {self.wrapped_in.name} and a part for images, of which "
                f"{self._num_of_other_parts} tensors are left out; the text model alone is read and exported"
            )
        return found

    def write_side_files(self, target: Path) -> None:
        """Copy the files except weights.

        Raises:
            OSError: a file cannot be read or written.
        """
        copy_side_files(self.path, target)

    def read_headers(self) -> dict[str, StoredAs]:
        """See PublishedModel. The files are those that the index names, or the single file; safetensors come first."""
        self._headers = self._read_headers()
        return see_through(self._headers, self._quantization, self.path)

    def read_stored(self, name: str, expert: int | None) -> Tensor:
        """See PublishedModel. In mapped memory."""
        file, stored = self._headers[name].file, self._stored_names[name]
        try:
            opened = self._open(file)
            if expert is None:
                tensor: Tensor = opened.get_tensor(stored)
            else:
                tensor = opened.get_slice(stored)[expert : expert + 1]
        except (OSError, SafetensorError) as error:
            raise HubError(f"{self.path / file}: {name} cannot be read: {error}") from None
        return tensor

    def release(self) -> None:
        """See PublishedModel."""
        self.close()
        self._files.clear()

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.path / file
            if path.suffix == ".safetensors":
                self._files[file] = self.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            else:
                self._files[file] = TorchFile(path)
        return self._files[file]

    def _read_headers(self) -> dict[str, StoredAs]:
        stored: dict[str, StoredAs] = {}
        self._stored_names: dict[str, str] = {}
        self._num_of_other_parts = 0
        index, places = self._index()
        for file in sorted(set(places.values())) if index else [self._single()]:
            try:
                opened = self._open(file)
                for name in opened.keys():  # noqa: SIM118  a safe_open is not a mapping
                    current = self._current_name(name)
                    if current is None:
                        self._num_of_other_parts += 1
                        continue
                    stored[current] = StoredAs(file, *_header(opened, name))
                    self._stored_names[current] = name
            except FileNotFoundError:
                raise HubError(
                    f"{self.path / file}: is missing, although {index or CONFIG} is there{self._others()}"
                ) from None
            except (OSError, SafetensorError) as error:
                raise HubError(f"{self.path / file}: is cut or damaged: {error}") from None
        wanted = {name: self._current_name(name) for name in places}
        absent = next((name for name, current in wanted.items() if current and current not in stored), None)
        if absent is not None:
            raise HubError(f"{self.path / places[absent]}: has no tensor {absent}, which {index} places there")
        return stored

    def _current_name(self, name: str) -> str | None:
        """Name of a stored tensor as readers know it; None for one of another part of the files, such as vision."""
        for old, current in _OLD_NAMES.items():
            if name.endswith(old):
                return name.removesuffix(old) + current
        for old, current in self.wrapped_in.wrapped_names.items() if self.wrapped_in else ():
            if name.startswith(old):
                return current + name.removeprefix(old) if current else None
        return name

    def _single(self) -> str:
        only_torch = not (self.path / SINGLE).is_file() and (self.path / _TORCH_SINGLE).is_file()
        return _TORCH_SINGLE if only_torch else SINGLE

    def _others(self) -> str:
        """Words for files of weights in a format that is not read; empty if there are none."""
        for pattern, what in _OTHER_WEIGHTS.items():
            found = next(iter(sorted(self.path.glob(pattern))), None)
            if found is not None:
                return f"; {found.name} is {what}"
        return ""

    def _index(self) -> tuple[str, Mapping[str, str]]:
        """Name of the index, and the file of each tensor; empty for a folder without an index."""
        candidates = (INDEX,) if (self.path / SINGLE).is_file() else (INDEX, _TORCH_INDEX)
        index = next((name for name in candidates if (self.path / name).is_file()), "")
        if not index:
            return "", {}
        weight_map = _read_json(self.path / index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise HubError(f"{self.path / index}: has no weight_map of files in this folder")
        return index, weight_map


def _header(opened: Any, name: str) -> tuple[str, tuple[int, ...]]:
    if isinstance(opened, TorchFile):
        return opened.header(name)
    view = opened.get_slice(name)
    return view.get_dtype(), tuple(view.get_shape())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HubError(f"{path}: is missing; name a folder in Hugging Face's format") from None
    except (OSError, ValueError) as error:
        raise HubError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise HubError(f"{path}: is not a JSON object")
    return values


__all__ = ["CONFIG", "FamilyError", "HubError", "HubFolder", "Piece", "is_hub_folder"]
