"""Recognition of a trained model: a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.find import find_checkpoint
from trainer.checkpoint.hub_weights import read_published
from trainer.checkpoint.load import load_weights
from trainer.checkpoint.metadata import load_metadata
from trainer.config.sections.parallel import ParallelConfig
from trainer.conversion.import_hub import config_of
from trainer.data.samples.continuation import end_of_documents
from trainer.generation.errors import GenerationError
from trainer.hub.folder import HubFolder, is_hub_folder
from trainer.hub.side_files import SIDE_FOLDER
from trainer.planning.build_config import build_config

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.parallel_model import ParallelModel


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint or a Hugging Face folder that was recognised, before its weights are read. No communication.

    Attributes:
        path: the checkpoint iter_*, or the Hugging Face folder.
        config: its config, for one rank.
        vocab_size: number of token ids, without padding.
        iteration: training iterations that the model has seen.
        hub_folder: the Hugging Face folder, or the files of one beside an imported checkpoint; None without.
        end_of_documents: token that ended documents in training; None: unknown.
        fill: reads the weights of a rank's part of the model.
        notes: values of its config that are taken as others, one sentence each.
    """

    path: Path
    config: TrainConfig
    vocab_size: int
    iteration: int
    hub_folder: Path | None
    end_of_documents: int | None
    fill: Callable[[ParallelModel], object]
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path) -> ModelSource:
        """Recognise ``path``: a run directory, a folder of checkpoints, an iter_*, or a Hugging Face folder.

        Raises:
            CheckpointError: there is no checkpoint, or it cannot be read.
            ConfigError: its config is not one of this version.
            FamilyError: a Hugging Face folder of an unknown family.
            GenerationError: the model does not generate text.
            HubError: a Hugging Face folder is damaged.
        """
        found = cls._of_hub_folder(path) if is_hub_folder(path) else cls._of_checkpoint(find_checkpoint(path))
        kind = found.config.model.architecture
        if kind != "decoder":
            raise GenerationError(f"{found.path}: holds a {kind} model, which does not continue text; name a decoder")
        return found

    @classmethod
    def _of_hub_folder(cls, path: Path) -> ModelSource:
        with HubFolder(path) as folder:
            config, vocab_size = config_of(folder, path), folder.vocab_size
        config = _serial(config.model_dump(mode="json"))
        fill = partial(read_published, path, config.model)
        return cls(path, config, vocab_size, 0, path, None, fill)

    @classmethod
    def _of_checkpoint(cls, checkpoint: Path) -> ModelSource:
        metadata = load_metadata(checkpoint)
        side = checkpoint.parent / SIDE_FOLDER
        return cls(
            checkpoint,
            _serial(metadata.config),
            metadata.vocab_size,
            metadata.iteration,
            side if side.is_dir() else None,
            end_of_documents(metadata.progress.get("data_state")),
            partial(load_weights, checkpoint),
            metadata.notes,
        )

    def reaching(self, positions: int) -> ModelSource:
        """The model with room for this many positions, if its config sets no limit and no table of positions does.

        Rope has angles for every position. How well a model continues past the length of its training is another
        question.
        """
        model = self.config.model
        has_table = model.position_embedding_type in ("learned_absolute", "relative")
        if model.max_position_embeddings is not None or has_table or positions <= self.config.max_position_embeddings:
            return self
        longer = model.model_copy(update={"max_position_embeddings": positions})
        return replace(self, config=self.config.model_copy(update={"model": longer}))

    def config_with(self, parallel: ParallelConfig) -> TrainConfig:
        """The config with the layout ``parallel``.

        Raises:
            ConfigError: the model cannot be divided so.
        """
        return build_config({**self.config.model_dump(mode="json"), "parallel": parallel.model_dump(mode="json")})


def _serial(values: Mapping[str, Any]) -> TrainConfig:
    """The same model on one rank. Kernels and device of the training run may be missing here, and change nothing."""
    trained = build_config(values)
    # A batch size for many replicas need not suit a single replica.
    training = trained.training.model_copy(
        update={
            **{"global_batch_size": None, "rampup_batch_size": [], "step_batch_size_schedule": None},
            **{"device": "auto"},
        }
    )
    model = trained.model.model_copy(update={"attention_backend": "auto"})
    return trained.model_copy(update={"model": model, "parallel": ParallelConfig(), "training": training})
