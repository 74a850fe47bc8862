"""HubFolder: a Hugging Face folder opened as one of our models. Reads single tensors from mapped memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.families.format.errors import FamilyError
from trainer.hub.errors import HubError
from trainer.hub.published import Piece, PublishedModel
from trainer.hub.quantized import CONFIG_KEY, StoredAs, see_through
from trainer.hub.side_files import copy_side_files

CONFIG = "config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


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

    def write_side_files(self, target: Path) -> None:
        """Copy the files except weights.

        Raises:
            OSError: a file cannot be read or written.
        """
        copy_side_files(self.path, target)

    def read_headers(self) -> dict[str, StoredAs]:
        """See PublishedModel. The files are those that the index names, or the single file."""
        self._headers = self._read_headers()
        return see_through(self._headers, self._quantization, self.path)

    def read_stored(self, name: str, expert: int | None) -> Tensor:
        """See PublishedModel. In mapped memory."""
        file = self._headers[name].file
        try:
            opened = self._open(file)
            if expert is None:
                tensor: Tensor = opened.get_tensor(name)
            else:
                tensor = opened.get_slice(name)[expert : expert + 1]
        except (OSError, SafetensorError) as error:
            raise HubError(f"{self.path / file}: {name} cannot be read: {error}") from None
        return tensor

    def release(self) -> None:
        """See PublishedModel."""
        self.close()
        self._files.clear()

    def _open(self, file: str) -> Any:
        if file not in self._files:
            opened = safe_open(str(self.path / file), framework="pt", device="cpu")
            self._files[file] = self.enter_context(opened)
        return self._files[file]

    def _read_headers(self) -> dict[str, StoredAs]:
        stored: dict[str, StoredAs] = {}
        index = self._index()
        for file in sorted(set(index.values())) if index else [SINGLE]:
            try:
                opened = self._open(file)
                for name in opened.keys():  # noqa: SIM118  a safe_open is not a mapping
                    view = opened.get_slice(name)
                    stored[name] = StoredAs(file, view.get_dtype(), tuple(view.get_shape()))
            except FileNotFoundError:
                raise HubError(
                    f"{self.path / file}: is missing, although {INDEX if index else CONFIG} is there"
                ) from None
            except (OSError, SafetensorError) as error:
                raise HubError(f"{self.path / file}: is cut or damaged: {error}") from None
        absent = next((name for name in index if name not in stored), None)
        if absent is not None:
            raise HubError(f"{self.path / index[absent]}: has no tensor {absent}, which {INDEX} places there")
        return stored

    def _index(self) -> Mapping[str, str]:
        if not (self.path / INDEX).is_file():
            return {}
        weight_map = _read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise HubError(f"{self.path / INDEX}: has no weight_map of files in this folder")
        return weight_map


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HubError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise HubError(f"{path}: is not a JSON object")
    return values


__all__ = ["CONFIG", "FamilyError", "HubError", "HubFolder", "Piece", "is_hub_folder"]
