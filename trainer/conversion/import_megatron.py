"""A torch_dist checkpoint of a GPT model of Megatron-core as a checkpoint of this trainer, tensor by tensor.

Names: sharded_state_dict of megatron/core/models/gpt/gpt_model.py and of its parts. Layers are stacked on a first axis,
or numbered if they differ. The order of rows within a tensor is ours: queries, key and value of one group after the
other, all gates before all ups.

Legend: L layers, E experts, F feed-forward width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from trainer.config.sections.model import ModelConfig
from trainer.config.train_config import TrainConfig
from trainer.conversion.distributed_files import METADATA, DistributedFiles
from trainer.conversion.errors import ConversionError
from trainer.conversion.file_plan import Unit
from trainer.conversion.imported_checkpoint import (
    Imported,
    describe_files,
    final_path,
    training_values,
    write_imported,
)
from trainer.conversion.megatron_config import model_of
from trainer.hub.tensor_file import DTYPE_NAMES, Planned
from trainer.planning.build_config import build_config
from trainer.planning.flops import count_parameters

_WORDS = "embedding.word_embeddings.weight"
_ENDS = {
    _WORDS: "embedding.word.weight",
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "decoder.final_layernorm.bias": "final_norm.bias",
    "output_layer.weight": "head.weight",
}
_LAYER = {
    "input_layernorm.weight": "attention_norm.weight",
    "input_layernorm.bias": "attention_norm.bias",
    # Transformer Engine's layers hold the norm before them.
    "self_attention.linear_qkv.layer_norm_weight": "attention_norm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "attention_norm.bias",
    "self_attention.linear_qkv.weight": "attention.qkv.weight",
    "self_attention.linear_qkv.bias": "attention.qkv.bias",
    "self_attention.linear_proj.weight": "attention.projection.weight",
    "self_attention.linear_proj.bias": "attention.projection.bias",
    "self_attention.q_layernorm.weight": "attention.q_norm.weight",
    "self_attention.q_layernorm.bias": "attention.q_norm.bias",
    "self_attention.k_layernorm.weight": "attention.k_norm.weight",
    "self_attention.k_layernorm.bias": "attention.k_norm.bias",
    "pre_mlp_layernorm.weight": "mlp_norm.weight",
    "pre_mlp_layernorm.bias": "mlp_norm.bias",
    "mlp.linear_fc1.layer_norm_weight": "mlp_norm.weight",
    "mlp.linear_fc1.layer_norm_bias": "mlp_norm.bias",
    "mlp.linear_fc1.weight": "mlp.fc1.weight",
    "mlp.linear_fc1.bias": "mlp.fc1.bias",
    "mlp.linear_fc2.weight": "mlp.fc2.weight",
    "mlp.linear_fc2.bias": "mlp.fc2.bias",
    "mlp.router.weight": "moe.router.weight",
    "mlp.router.expert_bias": "moe.router.expert_bias",
    "mlp.experts.experts.linear_fc1.weight": "moe.experts.fc1.weight",
    "mlp.experts.experts.linear_fc2.weight": "moe.experts.fc2.weight",
    "mlp.shared_experts.linear_fc1.weight": "moe.shared_expert.fc1.weight",
    "mlp.shared_experts.linear_fc2.weight": "moe.shared_expert.fc2.weight",
}
_LAYERS = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
# The optimizer, random states, and what Transformer Engine and the tokens-per-expert counters keep beside the weights.
_NO_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\..*|(.*\.)?_extra_state.*|rng_state.*|.*\.local_tokens_per_expert")


class _Source(NamedTuple):
    """Place of one of our tensors: a tensor of the folder, its layer on the first axis if there is one, our shape."""

    key: str
    layer: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MegatronModel:
    """An open torch_dist checkpoint as one of our models.

    Attributes:
        files: its tensors.
        model: its model section.
        sources: our global name -> where it is.
    """

    files: DistributedFiles
    model: ModelConfig
    sources: dict[str, _Source]

    @classmethod
    def of(cls, files: DistributedFiles) -> MegatronModel:
        """Find the model and all of its tensors.

        Raises:
            ConversionError: it is not a GPT model, or a tensor or argument is missing, left over or unknown.
        """
        if _WORDS not in files.tensors:
            raise ConversionError(
                f"{files.path}: is a checkpoint of torch.distributed.checkpoint (DCP), but has no tensor {_WORDS}, so "
                "that it is not a GPT model of Megatron-core; let the program that wrote it save a Hugging Face folder"
            )
        arguments = files.common().get("args")
        if arguments is None:
            raise ConversionError(
                f"{files.path}: has no arguments of Megatron-LM, neither in common.pt nor in common_state, so that the "
                "model is unknown; copy the whole folder"
            )
        named = arguments if isinstance(arguments, dict) else vars(arguments)
        rows = files.tensors[_WORDS].shape[0]
        vocab_size = min(named.get("vocab_size") or rows, rows)
        model = model_of(named, vocab_size, str(files.path))
        found = cls(files, model, dict(_sources(files, model, vocab_size)))
        found._check()
        return found

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary tables."""
        assert self.model.vocab_size is not None
        return self.model.vocab_size

    @property
    def total_bytes(self) -> int:
        """Size of all tensors."""
        return sum(unit.bytes for unit in self.units())

    def config(self) -> TrainConfig:
        """A training config with this model."""
        dtypes = {DTYPE_NAMES[self.files.tensors[source.key].dtype] for source in self.sources.values()}
        training = training_values(self.model.max_position_embeddings or 1, dtypes)
        return build_config({"model": self.model.model_dump(), "training": training, "optimizer": {"lr": 1e-5}})

    def units(self) -> list[Unit]:
        """All tensors under our names."""
        return [
            Unit(
                (Planned(name, self.files.tensors[source.key].dtype, source.shape),),
                partial(_read, self.files, name, source),
            )
            for name, source in self.sources.items()
        ]

    def _check(self) -> None:
        for name, source in self.sources.items():
            if self.files.tensors[source.key].dtype not in DTYPE_NAMES:
                raise ConversionError(
                    f"{self.files.path}: {source.key} has dtype {self.files.tensors[source.key].dtype}; weights can be "
                    + ", ".join(DTYPE_NAMES.values())
                )
            if name == "head.weight" and not self.model.untie_embeddings_and_output_weights:
                raise ConversionError(
                    f"{self.files.path}: has {source.key}, but its arguments say that the head is tied"
                )
        expected = count_parameters(self.config(), self.vocab_size).total
        found = sum(math.prod(s.shape) for name, s in self.sources.items() if not name.endswith("expert_bias"))
        if found != expected:
            raise ConversionError(
                f"{self.files.path}: its arguments describe {expected:,} parameters, but the tensors hold {found:,}; a "
                "part of the checkpoint is missing, or its model is of a kind that this trainer does not have"
            )


def iteration_folder(source: Path) -> Path:
    """The folder of one iteration that ``source`` is or names.

    Raises:
        ConversionError: it has none.
    """
    if (source / METADATA).is_file():
        return source
    try:
        named = (source / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        named = ""
    folders = [source / f"iter_{int(named):07d}"] if named.isdecimal() else [source / "release"]
    folders += sorted(source.glob("iter_*"), reverse=True)
    found = next((folder for folder in folders if (folder / METADATA).is_file()), None)
    if found is None:
        raise ConversionError(f"{source}: has no iteration with a {METADATA} file; copy the whole folder")
    return found


def import_megatron(source: MegatronModel, output: Path, advance: Callable[[int], None]) -> Path:
    """Write the checkpoint of iteration 0 into ``output``; returns its folder.

    Only weights are taken. Memory: one stored chunk and one tensor. An interrupted import is continued by the next.

    Raises:
        ConversionError: the output has a checkpoint, the disk has too little room, or reading or writing fails.
    """
    final_path(output)
    description = describe_files(
        source.files.path, sorted(entry for entry in source.files.path.iterdir() if entry.is_file())
    )
    return write_imported(
        Imported(source.units(), source.config(), source.vocab_size, None, description), output, advance
    )


def _sources(files: DistributedFiles, model: ModelConfig, vocab_size: int) -> Iterator[tuple[str, _Source]]:
    for key, stored in files.tensors.items():
        if _NO_WEIGHTS.fullmatch(key):
            continue
        layer = _LAYERS.fullmatch(key)
        ours = _ENDS.get(key) if layer is None else _LAYER.get(layer[2])
        if ours is None:
            raise ConversionError(f"{files.path}: holds the tensor {key}, which this trainer does not import")
        if layer is None:
            shape = (vocab_size, *stored.shape[1:]) if key in (_WORDS, "output_layer.weight") else stored.shape
            yield ours, _Source(key, None, shape)
        elif layer[1] is not None:
            yield f"layers.{layer[1]}.{ours}", _Source(key, None, _shape(ours, stored.shape, model))
        elif stored.shape[0] != model.num_layers:
            raise ConversionError(
                f"{files.path}: {key} has {stored.shape[0]} layers, but its arguments say {model.num_layers}"
            )
        else:
            for number in range(model.num_layers):
                yield f"layers.{number}.{ours}", _Source(key, number, _shape(ours, stored.shape[1:], model))


def _shape(ours: str, stored: tuple[int, ...], model: ModelConfig) -> tuple[int, ...]:
    """Our shape of a tensor: gates and ups [2 F, ...] are [2, F, ...] here, after the axis of experts if any."""
    if not model.is_gated or ".fc1." not in ours:
        return stored
    first = 1 if ".experts." in ours else 0
    return (*stored[:first], 2, stored[first] // 2, *stored[first + 1 :])


def _read(files: DistributedFiles, name: str, source: _Source) -> Iterator[Tensor]:
    """The tensor as a whole, or expert by expert."""
    prefix = () if source.layer is None else (source.layer,)
    ones = (1,) * len(prefix)
    whole = files.tensors[source.key].shape[len(prefix) :]
    if name in ("embedding.word.weight", "head.weight"):
        whole = source.shape
    if ".experts." not in name:
        yield files.read(source.key, (*prefix, *(0 for _ in whole)), (*ones, *whole)).view(source.shape)
        return
    for expert in range(whole[0]):
        offset, shape = (*prefix, expert, *(0 for _ in whole[1:])), (*ones, 1, *whole[1:])
        yield files.read(source.key, offset, shape).view(1, *source.shape[1:])
