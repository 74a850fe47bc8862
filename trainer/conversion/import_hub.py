"""A published model as a checkpoint of this trainer, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.conversion.errors import ConversionError
from trainer.conversion.file_plan import Unit
from trainer.conversion.imported_checkpoint import (
    Imported,
    describe_files,
    final_path,
    training_values,
    write_imported,
)
from trainer.hub.published import PublishedModel
from trainer.hub.side_files import SIDE_FOLDER, largest_vocabulary
from trainer.hub.tensor_file import DTYPE_NAMES, Planned
from trainer.planning.build_config import build_config
from trainer.planning.flops import count_parameters


def import_hub(source: PublishedModel, output: Path, advance: Callable[[int], None]) -> Path:
    """Write the checkpoint of iteration 0 into ``output``; returns its folder.

    Memory: one Hugging Face tensor and its converted form. An interrupted import is continued by the next.

    Args:
        source: the open folder or file.
        output: folder of checkpoints; must not have a checkpoint yet.
        advance: called with the number of bytes of every tensor written.

    Raises:
        ConversionError: the output has a checkpoint, the disk has too little room, or writing fails.
        HubError: the source cannot be read.
    """
    final_path(output)
    _check_size(source)
    source.check_copies()
    imported = Imported(
        units=[_unit(source, name) for name in source.weights],
        config=config_of(source, output / SIDE_FOLDER),
        vocab_size=source.vocab_size,
        write_side_files=source.write_side_files,
        description=describe_files(source.path, source.files),
    )
    return write_imported(imported, output, advance)


def _check_size(source: PublishedModel) -> None:
    rows, described = source.shape("embedding.word.weight")[0], source.vocab_size
    if rows != described:
        raise ConversionError(
            f"{source.where}: has vocab_size {described}, but the word table has {rows} rows; correct it"
        )
    vocabulary = largest_vocabulary(source.path)
    if vocabulary is not None and vocabulary[1] > described:
        raise ConversionError(
            f"{vocabulary[0]}: has {vocabulary[1]} tokens, but config.json has vocab_size {described}, so that the "
            "last tokens have no row in the word table; take the tokenizer of this model"
        )
    expected = count_parameters(config_of(source, None), described).total
    found = sum(math.prod(source.shape(name)) for name, rule in source.weights.items() if rule.is_parameter)
    if found != expected:
        raise ConversionError(
            f"{source.where}: describes {expected:,} parameters, but the files hold {found:,}; a size is wrong, "
            "or the files are of another model"
        )


def total_bytes(source: PublishedModel) -> int:
    """Size of all tensors of the folder."""
    return sum(_unit(source, name).bytes for name in source.weights)


def _unit(source: PublishedModel, name: str) -> Unit:
    return Unit((Planned(name, source.dtype(name), source.shape(name)),), partial(_pieces, source, name))


def _pieces(source: PublishedModel, name: str) -> Iterator[Tensor]:
    for piece in source.pieces(name):
        yield source.read(name, piece)
        source.release()


def config_of(source: PublishedModel, tokenizer_folder: Path | None) -> TrainConfig:
    """A training config with the source's model and tokenizer; its length is the longest of the model.

    Args:
        source: the open folder or file.
        tokenizer_folder: where its tokenizer will be; None for a config without one.

    Raises:
        ConversionError: values exclude each other, or a scaling of positions is not known.
    """
    model = source.model
    dtypes = {DTYPE_NAMES[source.dtype(name)] for name in source.weights}
    values = {
        "model": model.model_dump(),
        "training": training_values(model.max_position_embeddings or 1, dtypes),
        "optimizer": {"lr": 1e-5},
        "data": {} if tokenizer_folder is None else _tokenizer(source.side_files, tokenizer_folder.resolve()),
    }
    try:
        return build_config(values)
    except ConfigError as error:
        raise ConversionError(f"{source.where}: cannot be trained here: {error}") from None


def _tokenizer(names: Collection[str], folder: Path) -> dict[str, str]:
    if "tokenizer.json" in names:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    return {"tokenizer_model": str(folder / "tokenizer.model")} if "tokenizer.model" in names else {}
