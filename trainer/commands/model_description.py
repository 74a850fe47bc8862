"""ModelDescription: what a checkpoint, a Hugging Face folder or a GGUF file holds, as plain values."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.metadata import CheckpointMetadata, load_metadata
from trainer.config.errors import ConfigError
from trainer.config.sections.model import ModelConfig
from trainer.config.train_config import TrainConfig
from trainer.conversion.export_hub import exported_family
from trainer.data.errors import DataError
from trainer.data.tokenizers.factory import open_tokenizer, type_of
from trainer.data.tokenizers.settings import TokenizerSettings, settings_of
from trainer.data.tokenizers.special_names import declared_names
from trainer.families.catalogue import differences, nearest_family, read_model
from trainer.families.format.errors import FamilyError
from trainer.families.format.family import Family
from trainer.families.gguf.header import is_gguf
from trainer.hub.errors import HubError
from trainer.hub.folder import CONFIG, HubFolder, is_hub_folder
from trainer.hub.gguf_file import GgufFile
from trainer.hub.published import PublishedModel
from trainer.hub.side_files import SIDE_FOLDER
from trainer.hub.tensor_file import DTYPES
from trainer.planning.build_config import build_config
from trainer.planning.flops import count_by_layer, count_parameters


@dataclass
class ModelDescription:
    """Content of a path. None or empty: not known, or not there.

    Attributes:
        path: the folder or file.
        format: kind of the folder or file.
        problem: why the weights cannot be loaded.
        family: ``name`` and ``model_type``; or ``nearest`` and the keys of the model section in which it ``differs``.
        parameters: numbers: ``total``, ``active`` per token, and of each part.
        weights: ``bytes`` of the tensors, ``files`` and ``file_bytes``, and number of ``tensors`` of each dtype.
        training: ``iteration``, ``tokens``, ``layout`` and ``optimizer`` of a checkpoint of this trainer.
        tokenizer: its ``kind``, number of ``tokens`` and end of a document, or a ``problem``.
        model: keys of the section ``model`` that differ from their defaults.
        config_json: content of a config.json that describes no model known here.
        notes: sentences on what of the files is not read.
        tensors: ``name``, ``dtype`` and ``shape`` of each.
    """

    path: str
    format: str
    problem: str | None = None
    family: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None
    weights: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    tokenizer: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    config_json: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)

    def as_document(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


def describe_model(path: Path) -> ModelDescription:
    """Read what describes the model at ``path``, and no weights.

    A Hugging Face folder that cannot be loaded is described as far as its config.json goes.

    Raises:
        CheckpointError, ConfigError, HubError, FamilyError: there is no model, or its files are damaged.
    """
    if is_gguf(path):
        with GgufFile(path) as file, tempfile.TemporaryDirectory() as folder:
            file.write_side_files(Path(folder))
            return _of_published("GGUF file", file, Path(folder))
    if not is_hub_folder(path):
        return _of_checkpoint(find_checkpoint(path))
    try:
        with HubFolder(path, may_lack_heads=True) as source:
            return _of_published("Hugging Face folder", source, path)
    except (HubError, FamilyError) as error:
        return _of_config_json(path, str(error))


def _of_published(kind: str, source: PublishedModel, side_folder: Path) -> ModelDescription:
    found = ModelDescription(str(source.path), kind, notes=list(source.notes))
    if source.absent:
        found.notes.append(f"{source.path}: holds no tensor of the heads {', '.join(sorted(source.absent))}")
    _add_model(found, source.model, source.family, side_folder)
    found.tensors = [
        _tensor(name, f"{_word(entry.dtype)}{_packing(entry.packed)}", entry.shape)
        for name, entry in source.stored.items()
    ]
    found.weights = _weights(
        ((DTYPES[entry.dtype].itemsize, entry.shape) for entry in source.stored.values()),
        [entry.stat().st_size for entry in source.weight_files],
        found.tensors,
    )
    return found


def _of_config_json(path: Path, problem: str) -> ModelDescription:
    found = ModelDescription(str(path), "Hugging Face folder", problem)
    keys = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    try:
        family, model = read_model(keys, str(path / CONFIG))
    except FamilyError:
        found.config_json = keys
        found.tokenizer = _tokenizer(TokenizerSettings(tokenizer_model=str(path)), path)
    else:
        _add_model(found, model, family, path)
    return found


def _add_model(found: ModelDescription, model: ModelConfig, family: Family, side_folder: Path) -> None:
    found.family = {"name": family.name, "model_type": family.model_type}
    found.tokenizer = _tokenizer(TokenizerSettings(tokenizer_model=str(side_folder)), side_folder)
    found.model = model.model_dump(exclude_defaults=True)
    length = model.max_position_embeddings or 1
    values = {"model": model.model_dump(), "training": {"train_iters": 0, "seq_length": length}, "optimizer": {"lr": 1}}
    try:
        found.parameters = _parameters(build_config(values), model.vocab_size or 0)
    except ConfigError as error:
        found.problem = found.problem or f"{found.path}: cannot be trained here: {error}"


def _of_checkpoint(path: Path) -> ModelDescription:
    metadata = load_metadata(path)
    found = ModelDescription(str(path), "checkpoint", training=_training(metadata))
    stored = metadata.tensors["model"]
    found.tensors = [_tensor(name, _word(tensor.dtype), tensor.shape) for name, tensor in sorted(stored.items())]
    found.weights = _weights(
        ((DTYPES[tensor.dtype].itemsize, tensor.shape) for tensor in stored.values()),
        list(metadata.files.values()),
        found.tensors,
    )
    try:
        config = build_config(metadata.config)
    except ConfigError as error:
        found.problem = f"{path}: its config is of another release: {error}"
        return found
    found.family = _family(path, config.model)
    found.parameters = _parameters(config, metadata.vocab_size)
    found.model = config.model.model_dump(exclude_defaults=True) | {
        "vocab_size": metadata.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    settings, side_folder = settings_of(config.data, config.model.vocab_size), path.parent / SIDE_FOLDER
    if not settings.has_files and side_folder.is_dir():
        settings = TokenizerSettings(tokenizer_model=str(side_folder))
    named = Path(settings.tokenizer_model or settings.vocab_file or side_folder)
    found.tokenizer = _tokenizer(settings, named if named.is_dir() else named.parent)
    return found


def _training(metadata: CheckpointMetadata) -> dict[str, Any]:
    return {
        "iteration": metadata.iteration,
        "tokens": metadata.progress.get("consumed_tokens", 0),
        "samples": metadata.progress.get("consumed_samples", 0),
        "is_imported": metadata.is_imported,
        "layout": dict(metadata.layout),
        "optimizer": dict(metadata.optimizer) if metadata.optimizer else None,
    }


def _family(checkpoint: Path, model: ModelConfig) -> dict[str, Any] | None:
    try:
        family = exported_family(checkpoint, model)
    except FamilyError:
        nearest = nearest_family(model)
        return nearest and {"name": None, "nearest": nearest[0].name, "differs_in": _different_keys(nearest[0], model)}
    return {"name": family.name, "model_type": family.model_type}


def _different_keys(family: Family, model: ModelConfig) -> list[str]:
    keys = family.write_config(model, model.vocab_size or 1, model.max_position_embeddings or 1)
    _, version = read_model({**keys, "model_type": family.model_type}, CONFIG)
    return [key for key, *_ in differences(version, model)]


def _parameters(config: TrainConfig, vocab_size: int) -> dict[str, Any]:
    counts = count_parameters(config, vocab_size)
    return {
        "total": counts.total,
        "active": counts.active,
        "embedding": counts.input_embedding,
        "layers": [asdict(layers) for layers in count_by_layer(config.model)],
        "head": counts.output_layer,
        "ends": counts.ends + counts.samples,
    }


def _weights(
    tensors: Iterable[tuple[int, tuple[int, ...]]], file_bytes: list[int], listed: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "bytes": sum(itemsize * math.prod(shape) for itemsize, shape in tensors),
        "files": len(file_bytes),
        "file_bytes": sum(file_bytes),
        "tensors": dict(Counter(tensor["dtype"] for tensor in listed).most_common()),
    }


def _tensor(name: str, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape)}


def _word(dtype: str) -> str:
    return str(DTYPES[dtype]).removeprefix("torch.")


def _packing(packed: object | None) -> str:
    return "" if packed is None else f" from {type(packed).__name__.lower()}"


def _tokenizer(settings: TokenizerSettings, folder: Path) -> dict[str, Any] | None:
    """The tokenizer; None if no files are named, or if the folder holds none."""
    if not settings.has_files:
        return None if settings.tokenizer_type is None else {"kind": settings.tokenizer_type}
    try:
        kind = settings.tokenizer_type or type_of(settings)
    except DataError:
        return None
    try:
        tokenizer = open_tokenizer(settings)
        names: Mapping[str, str] = declared_names(folder)
        eos = {"id": tokenizer.eod, "name": names.get("eod")}
        return {"kind": kind, "tokens": tokenizer.vocab_size, "eos": eos}
    except DataError as error:
        return {"kind": kind, "problem": str(error)}
