"""A checkpoint of this trainer, of any layout, as a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.metadata import CheckpointMetadata, load_metadata
from trainer.checkpoint.stored_tensors import StoredTensors
from trainer.config.checkpoint_flags import MAX_BYTES_PER_FILE
from trainer.config.sections.model import ModelConfig
from trainer.config.train_config import TrainConfig
from trainer.conversion.errors import ConversionError
from trainer.conversion.file_plan import PlannedFile, Unit, finish, plan_files, write_files
from trainer.families.catalogue import FAMILIES, describes, family_of_model
from trainer.families.format.family import Family, Weight
from trainer.families.format.forms import ByExpert, Form
from trainer.families.format.quantization import CONFIG_KEY
from trainer.families.format.without_effect import WITHOUT_EFFECT
from trainer.hub.folder import CONFIG, INDEX, SINGLE
from trainer.hub.layouts import theirs_shapes, to_theirs
from trainer.hub.side_files import copy_side_files, name_old_tokenizer_class, side_config
from trainer.hub.tensor_file import DTYPES, Planned
from trainer.parallel_model import parameter_dtype
from trainer.planning.build_config import build_config
from trainer.process.run_directory import sync_directory

_TOKEN_KEYS: tuple[str, ...] = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_DTYPE_WORDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Export:
    """A checkpoint with the family that describes it.

    Attributes:
        checkpoint: folder of the checkpoint.
        metadata: of the checkpoint.
        config: of the run that wrote it.
        family: describes its model.
        weights: rules of all its tensors, and of those that repeat another one.
    """

    checkpoint: Path
    metadata: CheckpointMetadata
    config: TrainConfig
    family: Family
    weights: tuple[Weight, ...]

    @classmethod
    def open(cls, checkpoint: Path) -> Export:
        """Read the metadata and choose the family.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            FamilyError: the model is of no published family.
            ConversionError: tensors are missing or left over.
        """
        metadata = load_metadata(checkpoint)
        config = build_config(metadata.config)
        family = exported_family(checkpoint, config.model)
        weights = (*family.weights(config.model), *family.copies(config.model))
        stored, needed = metadata.tensors["model"].keys(), {rule.ours for rule in weights}
        for names, what in ((needed - stored, "lacks"), (stored - needed, "has the surplus tensor")):
            if names:
                raise ConversionError(f"{checkpoint}: {what} {min(names)}, so that it is not a {family.name} model")
        return cls(checkpoint, metadata, config, family, weights)

    def dtype(self, rule: Weight) -> torch.dtype:
        """Dtype of one of the tensors in the export."""
        trained = trained_dtype(self.metadata, self.config) if rule.is_parameter else None
        return trained or DTYPES[self.metadata.tensors["model"][rule.ours].dtype]

    def shape(self, rule: Weight) -> tuple[int, ...]:
        """Shape of one of the tensors."""
        return self.metadata.tensors["model"][rule.ours].shape

    @property
    def total_bytes(self) -> int:
        """Size of all tensors."""
        return sum(self.dtype(rule).itemsize * torch.Size(self.shape(rule)).numel() for rule in self.weights)


def trained_dtype(metadata: CheckpointMetadata, config: TrainConfig) -> torch.dtype | None:
    """Dtype of parameters in the steps of a run; None for an imported checkpoint, whose tensors keep their dtypes.

    ZeRO stages 2 and 3 store float32 masters, which every step rounds to this dtype.
    """
    return parameter_dtype(config.training) if metadata.layout else None


def exported_family(checkpoint: Path, model: ModelConfig) -> Family:
    """The family that an export of ``checkpoint`` has: the one that the training began with, if it still fits.

    Raises:
        FamilyError: the model is of no published family.
    """
    _, keys = side_config(checkpoint)
    named = next((family for family in FAMILIES if family.model_type == keys.get("model_type")), None)
    if named is not None and describes(named, model):
        return named
    return family_of_model(model)


def export_hub(
    export: Export, output: Path, advance: Callable[[int], None], most_bytes: int = MAX_BYTES_PER_FILE
) -> int:
    """Write the folder ``output``; returns the number of its tensors.

    Memory: one tensor and its converted form. The folder gets its name when it is complete; an interrupted export is
    continued by the next.

    Args:
        export: the checkpoint.
        output: must not exist.
        advance: called with the number of bytes of every tensor written.
        most_bytes: largest size of the tensors in one file.

    Raises:
        ConversionError: the output exists, the disk has too little room, or writing fails.
        CheckpointError: the checkpoint cannot be read.
    """
    if output.exists():
        raise ConversionError(f"{output}: exists already; name another folder as --output")
    temporary = output.with_name(f".{output.name}.unfinished")
    with StoredTensors(export.checkpoint, export.metadata) as stored:
        units = [unit for rule in export.weights for unit in _units(export, stored, rule)]
        files = plan_files(units, most_bytes, _file_name)
        write_files(temporary, files, _description(export, most_bytes), advance)
    try:
        _describe(export, files, temporary)
        finish(temporary)
        sync_directory(temporary)
        temporary.rename(output)
        sync_directory(output.parent)
    except OSError as error:
        raise ConversionError(f"{error.filename or output}: cannot be written: {error.strerror or error}") from error
    return sum(len(unit.planned) for unit in units)


def discard_unfinished(output: Path) -> None:
    """Remove what an interrupted export has left."""
    shutil.rmtree(output.with_name(f".{output.name}.unfinished"), ignore_errors=True)


def _units(export: Export, stored: StoredTensors, rule: Weight) -> Iterator[Unit]:
    """The rule's tensors: together, or expert by expert."""
    shape, dtype = export.shape(rule), export.dtype(rule)
    origin = (0,) * len(shape)
    if not isinstance(rule.form, ByExpert):
        yield _unit(stored, rule.ours, rule.form, rule.theirs, origin, shape, dtype)
        return
    size = len(rule.theirs) // rule.form.count
    for expert in range(rule.form.count):
        names = rule.theirs[expert * size : (expert + 1) * size]
        offset, one = (expert, *origin[1:]), (1, *shape[1:])
        yield _unit(stored, rule.ours, ByExpert(1, rule.form.each), names, offset, one, dtype)


def _unit(
    stored: StoredTensors,
    name: str,
    form: Form,
    theirs: Sequence[str],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Unit:
    shapes = theirs_shapes(form, shape)
    planned = tuple(Planned(name, dtype, shape) for name, shape in zip(theirs, shapes, strict=True))
    return Unit(planned, partial(_convert, stored, name, form, offset, shape, dtype))


def _convert(
    stored: StoredTensors,
    name: str,
    form: Form,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    yield from to_theirs(form, stored.read("model", name, offset, shape, dtype))
    stored.release()


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _description(export: Export, most_bytes: int) -> str:
    status = (export.checkpoint / "metadata.json").stat()
    return json.dumps([str(export.checkpoint.resolve()), status.st_size, status.st_mtime_ns, most_bytes])


def _describe(export: Export, files: Sequence[PlannedFile], folder: Path) -> None:
    """Write config.json, the index and the files beside the weights."""
    side_folder, keys = side_config(export.checkpoint)
    if side_folder is not None:
        copy_side_files(side_folder, folder)
        name_old_tokenizer_class(folder)
    model, config = export.config.model, export.config
    dtype = _DTYPE_WORDS[max((export.dtype(rule) for rule in export.weights), key=_count(export))]
    # Other keys of another family would mean nothing in this one.
    carried = keys if keys.get("model_type") == export.family.model_type else keys.keys() & WITHOUT_EFFECT.keys()
    written = {
        # The weights are no longer quantized.
        **{key: keys[key] for key in carried if key != CONFIG_KEY},
        "architectures": [export.family.architecture],
        **export.family.write_config(model, export.metadata.vocab_size, config.max_position_embeddings),
        "model_type": export.family.model_type,
        **export.family.token_ids(keys),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    _write_json(folder / CONFIG, written)
    if not (folder / "generation_config.json").is_file():
        tokens = {key: written[key] for key in _TOKEN_KEYS if key in written}
        _write_json(folder / "generation_config.json", {"_from_model_config": True} | tokens)
    if len(files) > 1:
        places = {tensor.name: file.name for file in files for unit in file.units for tensor in unit.planned}
        sizes = {"total_parameters": _elements(files), "total_size": export.total_bytes}
        _write_json(folder / INDEX, {"metadata": sizes, "weight_map": dict(sorted(places.items()))})


def _count(export: Export) -> Callable[[torch.dtype], int]:
    """Number of tensors of a dtype: config.json names the dtype of most."""
    dtypes = [export.dtype(rule) for rule in export.weights]
    return dtypes.count


def _elements(files: Sequence[PlannedFile]) -> int:
    return sum(torch.Size(tensor.shape).numel() for file in files for unit in file.units for tensor in unit.planned)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
