"""Check of a conversion: logits of a checkpoint against those of a Hugging Face folder, in bounded memory.

Legend: S tokens of a sequence, R rows, the positions whose logits are compared, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.directory import CheckpointError
from trainer.checkpoint.metadata import CheckpointMetadata, load_metadata
from trainer.checkpoint.stored_tensors import StoredTensors
from trainer.config.sections.parallel import ParallelConfig
from trainer.config.train_config import TrainConfig
from trainer.conversion.bounded_model import Weights, build_bounded_model
from trainer.conversion.errors import ConversionError
from trainer.conversion.export_hub import trained_dtype
from trainer.conversion.witness import LONGEST_WITH_SCORES, fault_of_witness, has_witness, logits_of_transformers
from trainer.hub.folder import HubFolder
from trainer.hub.tensor_file import DTYPES
from trainer.parallel_model import ParallelModel
from trainer.pipeline.executor import forward_logits
from trainer.planning.build_config import build_config
from trainer.planning.flops import count_parameters

BOUND = 1e-4
"""Largest difference of logits in float32, relative to the largest logit: rounding of a few hundred layers stays below
this, and a wrong norm, bias or scale is above."""
_POSITIONS_OF_BOUND = 512
"""Tokens up to which the bound holds. transformers rounds an angle of rope, of the size of its position, to float32."""
_SEED = 20_017
_SHORT = 64
_LONGEST_SPAN = 4096
_BEYOND = 32
"""Tokens of a text that are beyond the longest span of the model."""
_MOST_FLOPS = 2e13
"""Operations of a longer text than usual: a minute or a few on a login node."""
_MOST_ROWS = 128
_OWN = "this trainer's own import"
_CLASS_BESIDE_IMAGES = "AutoModelForImageTextToText"
"""Class of transformers that loads files with a part for images, whatever their text model is."""


@dataclass(frozen=True)
class Verification:
    """Result of a check.

    Attributes:
        witness: what computed the logits of the folder: ``transformers`` and its version, or this trainer's own import.
        difference: largest difference of logits, relative to the largest logit.
        tensors: number of tensors in the folder.
        tokens: length of the text.
    """

    witness: str
    difference: float
    tensors: int
    tokens: int

    @property
    def bound(self) -> float:
        """Largest difference of equal models on a text of this length."""
        return BOUND * max(1.0, self.tokens / _POSITIONS_OF_BOUND)

    @property
    def is_good(self) -> bool:
        """True if the difference is within the bound; a number that is not finite is not."""
        return self.difference <= self.bound


def verify_export(checkpoint: Path, folder: Path) -> Verification:
    """Compare the logits of a fixed text, in float32 on the CPU.

    The witness is transformers if it is installed and without a known fault in this model, else this trainer's own
    reader. Memory: the weights of one layer
    and of the vocabulary tables; without the package accelerate, transformers holds all of its model in float32.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        HubError: the folder cannot be read.
        ConversionError: transformers cannot load the folder, or compute its logits.
    """
    metadata = load_metadata(checkpoint)
    config = build_config(metadata.config)
    tokens = fixed_text(config, metadata.vocab_size)
    rows = torch.linspace(0, tokens.shape[1] - 1, min(tokens.shape[1], _MOST_ROWS)).long()
    with StoredTensors(checkpoint, metadata) as stored:
        shapes = {name: tensor.shape for name, tensor in metadata.tensors["model"].items()}
        weights = Weights(checkpoint, shapes, partial(_read_stored, stored, metadata), trained_dtype(metadata, config))
        ours = _logits(config, metadata.vocab_size, weights, tokens, rows)
    with HubFolder(folder) as source:
        count = source.num_tensors
        auto_class = _CLASS_BESIDE_IMAGES if source.wrapped_in else source.family.auto_class
        fault = fault_of_witness(source.family.model_type, source.model) if has_witness() else ""
        if fault is not None:
            source.check_copies()
            weights = Weights(folder, {name: source.shape(name) for name in source.weights}, partial(_read_hub, source))
            witness = f"{_OWN} ({fault})" if fault else _OWN
            theirs = _logits(config, metadata.vocab_size, weights, tokens, rows)
    if fault is None:
        witness, theirs = logits_of_transformers(folder, auto_class, tokens, rows, checkpoint.parent)
    if ours.shape != theirs.shape:
        raise ConversionError(
            f"{folder}: gives logits of {theirs.shape[-1]:,} tokens, but {checkpoint} of {ours.shape[-1]:,}; they are "
            "different models"
        )
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    return Verification(witness, float(difference), count, tokens.shape[1])


def fixed_text(config: TrainConfig, vocab_size: int) -> Tensor:
    """Token ids [1, S] that are the same for every model of this shape."""
    generator = torch.Generator().manual_seed(_SEED)
    length = min(_length(config, vocab_size), config.max_position_embeddings)
    return torch.randint(0, vocab_size, (1, length), generator=generator)


def _length(config: TrainConfig, vocab_size: int) -> int:
    """Tokens of the text: more than a window, or than the context before a scaling of rope, if that is affordable."""
    model = config.model
    spans = [model.window_of(layer) for layer in range(model.num_layers)]
    spans.append((model.rope_scaling or {}).get("original_max_position_embeddings"))
    known = [int(span) for span in spans if span is not None and span <= _LONGEST_SPAN]
    length = max(_SHORT, *(span + _BEYOND for span in known)) if known else _SHORT
    # Scores with a cap or a sink are computed as a whole, by transformers too.
    keeps_scores = model.attn_logit_softcapping is not None or model.attention_sinks
    costs = 2 * count_parameters(config, vocab_size).active * length
    return _SHORT if costs > _MOST_FLOPS or (keeps_scores and length > LONGEST_WITH_SCORES) else length


def _serial(config: TrainConfig) -> TrainConfig:
    """The same model on one rank in float32."""
    training = config.training.model_copy(
        update={
            **{"bf16": False, "fp16": False},
            **{"global_batch_size": None, "rampup_batch_size": [], "step_batch_size_schedule": None},
        }
    )
    model = config.model.model_copy(update={"attention_backend": "auto"})
    return config.model_copy(update={"model": model, "training": training, "parallel": ParallelConfig()})


def _logits(config: TrainConfig, vocab_size: int, weights: Weights, tokens: Tensor, rows: Tensor) -> Tensor:
    """Logits [1, R, V] of the text; an encoder reads the same text."""
    model = build_bounded_model(_serial(config), vocab_size, weights)
    with _only_rows(model, rows, tokens.shape[1]), torch.no_grad():
        logits = forward_logits(model, tokens, tokens if config.model.is_encoder_decoder else None)
    if logits is None:
        raise CheckpointError("a serial model has no last stage")
    return logits.float()


@contextmanager
def _only_rows(model: ParallelModel, rows: Tensor, length: int) -> Iterator[None]:
    """Let the head compute logits of these positions alone: those of a long text are large."""
    if len(rows) == length:
        yield
        return
    hook = (
        model.chunks[-1]
        .get_submodule("head")
        .register_forward_pre_hook(lambda _, hidden: (hidden[0].index_select(0, rows), *hidden[1:]))
    )
    yield
    hook.remove()


def _read_stored(stored: StoredTensors, metadata: CheckpointMetadata, name: str) -> Tensor:
    # What was read before has been copied: its pages need not count as memory of this process.
    stored.release()
    tensor = metadata.tensors["model"][name]
    return stored.read("model", name, (0,) * len(tensor.shape), tensor.shape, DTYPES[tensor.dtype])


def _read_hub(source: HubFolder, name: str) -> Tensor:
    source.release()
    return torch.cat([source.read(name, piece) for piece in source.pieces(name)])
