"""Check of an exported folder: its logits against those of the checkpoint.

Legend: S tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.directory import CheckpointError
from trainer.checkpoint.hub_weights import read_hub_weights
from trainer.checkpoint.load import load_weights
from trainer.checkpoint.metadata import load_metadata
from trainer.config.sections.parallel import ParallelConfig
from trainer.config.train_config import TrainConfig
from trainer.conversion.errors import ConversionError
from trainer.conversion.export_hub import trained_dtype
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.hub.folder import HubFolder
from trainer.parallel_model import ParallelModel, build_model
from trainer.pipeline.executor import forward_logits
from trainer.planning.build_config import build_config

BOUND = 1e-4
"""Largest difference of logits in float32, relative to the largest logit: rounding of a few hundred layers stays below
this, and a wrong norm, bias or scale is above."""
_TOKENS, _SEED = 64, 20_017


@dataclass(frozen=True)
class Verification:
    """Result of a check.

    Attributes:
        witness: what computed the logits of the folder: ``transformers`` and its version, or this trainer's own import.
        difference: largest difference of logits, relative to the largest logit.
        tensors: number of tensors in the folder.
    """

    witness: str
    difference: float
    tensors: int

    @property
    def is_good(self) -> bool:
        """True if the difference is within the bound; a number that is not finite is not."""
        return self.difference <= BOUND


def verify_export(checkpoint: Path, folder: Path) -> Verification:
    """Compare the logits of a fixed text, in float32 on the CPU.

    The witness is transformers if it is installed, else this trainer's own reader. Memory: one model in float32 at a
    time.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        HubError: the folder cannot be read.
        ConversionError: transformers cannot load the folder, or compute its logits.
    """
    metadata = load_metadata(checkpoint)
    config = _serial(build_config(metadata.config))
    tokens = fixed_text(metadata.vocab_size, config.max_position_embeddings)
    model = _build(config, metadata.vocab_size)
    load_weights(checkpoint, model)
    _round(model, trained_dtype(metadata, build_config(metadata.config)))
    ours = _logits(config, model, tokens)
    del model
    with HubFolder(folder) as source:
        count, auto_class = source.num_tensors, source.family.auto_class
        if find_spec("transformers") is None:
            witness = "this trainer's own import"
            model = _build(config, metadata.vocab_size)
            read_hub_weights(source, model)
            model.gradients.weights_changed()
            model.gradients.wait_for_weights()
            theirs = _logits(config, model, tokens)
    if find_spec("transformers") is not None:
        witness, theirs = _logits_of_transformers(folder, auto_class, tokens)
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    return Verification(witness, float(difference), count)


def fixed_text(vocab_size: int, longest: int) -> Tensor:
    """Token ids [1, S] that are the same for every model of this vocabulary."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, vocab_size, (1, min(_TOKENS, longest)), generator=generator)


def _serial(config: TrainConfig) -> TrainConfig:
    """The same model on one rank in float32."""
    training = config.training.model_copy(update={"bf16": False, "fp16": False, "global_batch_size": None})
    model = config.model.model_copy(update={"attention_backend": "auto"})
    return config.model_copy(update={"model": model, "training": training, "parallel": ParallelConfig()})


def _build(config: TrainConfig, vocab_size: int) -> ParallelModel:
    mesh = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
    model = build_model(config, vocab_size, mesh, ProcessGroups(), torch.device("cpu"))
    model.chunks[0].eval()
    return model


def _round(model: ParallelModel, dtype: torch.dtype | None) -> None:
    """Give the parameters the values that an export has."""
    if dtype is None:
        return
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.copy_(parameter.to(dtype))


def _logits(config: TrainConfig, model: ParallelModel, tokens: Tensor) -> Tensor:
    """Logits of the text; an encoder reads the same text."""
    with torch.no_grad():
        logits = forward_logits(model, tokens, tokens if config.model.is_encoder_decoder else None)
    if logits is None:
        raise CheckpointError("a serial model has no last stage")
    return logits.float()


def _logits_of_transformers(folder: Path, auto_class: str, tokens: Tensor) -> tuple[str, Tensor]:
    import transformers

    what = "load it"
    try:
        # No code of the folder is run: trust_remote_code stays off. The grouped product of experts, its default, wants
        # widths that divide by 8.
        model = getattr(transformers, auto_class).from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
        )
        what = "compute its logits"
        inputs = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            found = model(tokens, **inputs)
            # BERT has logits of tokens and of samples.
            logits: Tensor = (found.prediction_logits if "prediction_logits" in found else found.logits).float()
    except Exception as error:
        raise ConversionError(f"{folder}: transformers cannot {what}: {type(error).__name__}: {error}") from error
    return f"transformers {transformers.__version__}", logits
