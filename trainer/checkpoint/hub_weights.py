"""Weights of a Hugging Face folder or a GGUF file in a model of any layout."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trainer.checkpoint.directory import AnotherModelError, CheckpointError
from trainer.checkpoint.fill import Block, fill_shard
from trainer.checkpoint.load import check_same_model
from trainer.checkpoint.saving.staging import stored_shape
from trainer.families.catalogue import first_difference
from trainer.families.format.errors import FamilyError
from trainer.families.gguf.header import is_gguf
from trainer.hub.errors import HubError
from trainer.hub.folder import HubFolder, is_hub_folder
from trainer.hub.gguf_file import GgufFile

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from trainer.checkpoint.regions import Region
    from trainer.config.sections.model import ModelConfig
    from trainer.hub.published import PublishedModel
    from trainer.parallel_model import ParallelModel


def is_published(path: Path) -> bool:
    """True for a Hugging Face folder, and for a GGUF file."""
    return is_hub_folder(path) or is_gguf(path)


def read_published(
    path: Path,
    expected: ModelConfig,
    model: ParallelModel,
    may_differ: Collection[str] = (),
    *,
    may_lack_heads: bool = False,
) -> None:
    """Fill this rank's shards of the weights from a published model. Each rank reads alone.

    Args:
        path: a Hugging Face folder, or a GGUF file, whose tensors are dequantized one at a time.
        expected: model section of the config.
        model: this rank's part, built from ``expected``.
        may_differ: keys of the model section that are not compared.
        may_lack_heads: leave heads that a folder lacks as they were drawn.

    Raises:
        AnotherModelError: the path holds another model, or one of an unknown family.
        CheckpointError: the files cannot be read.
    """
    try:
        with GgufFile(path) if is_gguf(path) else HubFolder(path, may_lack_heads=may_lack_heads) as source:
            check_same_family_model(path, source.model, expected, may_differ)
            read_hub_weights(source, model)
    except FamilyError as error:
        raise AnotherModelError(str(error)) from None
    except HubError as error:
        raise CheckpointError(str(error)) from None


def check_same_family_model(
    path: Path, found: ModelConfig, expected: ModelConfig, may_differ: Collection[str] = ()
) -> None:
    """Check that a published model is the one that the config describes, except for the keys ``may_differ``.

    Raises:
        AnotherModelError: names the first key that differs, and both values.
    """
    different = first_difference(found, expected.model_copy(update={key: getattr(found, key) for key in may_differ}))
    if different is not None:
        key, theirs, ours = different
        raise AnotherModelError(
            f"{path} holds a model with model.{key} {theirs}, but this run has {ours}; set it to {theirs}"
        )


def read_hub_weights(folder: PublishedModel, model: ParallelModel) -> None:
    """Fill this rank's shards of the weights. Each rank reads alone, one Hugging Face tensor at a time.

    Heads that the folder lacks keep their values.

    Raises:
        AnotherModelError: the folder holds another model.
        HubError: the files cannot be read.
    """
    folder.check_copies()
    drawn = {name: stored_shape(layout) for name, layout in model.layouts.items() if name in folder.absent}
    check_same_model(folder.path, {name: folder.shape(name) for name in folder.weights} | drawn, model)
    for shard in model.stored_shards:
        name = shard.name
        if name in folder.absent:
            continue
        pieces = list(folder.pieces(name))
        blocks = [Block(piece.offset, piece.shape, partial(folder.read, name, piece)) for piece in pieces]
        fill_shard(f"{folder.path}: {name}", model, shard, shard.weight, partial(_all, blocks))


def _all(blocks: list[Block], _: Region) -> list[Block]:
    return blocks
