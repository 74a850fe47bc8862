"""Family: one published architecture as a value. Torch-free.

A family says three things: keys of config.json -> keys of our model section, the way back, and for each of our tensors
the Hugging Face tensors that it is made of. All reading, writing and checking lies in trainer.hub and works from these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.families.format.forms import Form, Plain
from trainer.families.format.hub_config import HubConfig

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


@dataclass(frozen=True)
class Weight:
    """One of our tensors and the Hugging Face tensors that it is made of.

    Attributes:
        ours: global name, as in ParameterLayout.
        theirs: names in the order that ``form`` takes.
        form: conversion between them; linear, so that it also maps gradients.
        is_parameter: gradients reach it; False for a stored number such as the bias that only chooses experts.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Form = field(default_factory=Plain)
    is_parameter: bool = True


def weight(ours: str, *theirs: str, form: Form | None = None, is_parameter: bool = True) -> Weight:
    """A Weight; without ``form`` the tensors are equal."""
    return Weight(ours, theirs, form or Plain(), is_parameter)


def affine(ours: str, theirs: str, *, has_bias: bool, form: Form | None = None) -> Iterator[Weight]:
    """The weight of a layer, and its bias if it has one."""
    for what in ("weight", "bias") if has_bias else ("weight",):
        yield weight(f"{ours}.{what}", f"{theirs}.{what}", form=form)


BESIDE_IMAGES: Mapping[str, str] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
    **dict.fromkeys(("vision_tower.", "multi_modal_projector."), ""),
    **dict.fromkeys(("model.vision_tower.", "model.multi_modal_projector."), ""),
}
"""First part of a name in files with a part for images -> the one of the text model; empty for other parts."""


def _no_copies(_: ModelConfig) -> Iterator[Weight]:
    yield from ()


def _no_notes(_: Mapping[str, Any]) -> Iterator[str]:
    yield from ()


def _no_token_ids(_: Mapping[str, Any]) -> Mapping[str, int]:
    return {}


@dataclass(frozen=True)
class Family:
    """One row of the catalogue.

    Attributes:
        name: short name, for people.
        model_type: ``model_type`` of config.json.
        architecture: class of transformers that an export names.
        read_config: config.json -> keys of the model section.
        write_config: model section with its vocabulary size -> keys of config.json, without those about rope,
            which trainer.families.format.rope writes in both forms.
        weights: model section -> all tensors of the model.
        copies: model section -> further Hugging Face tensors that repeat those of a weight. Files may lack them; an
            export has them.
        word_table_copies: Hugging Face names under which files may hold the word table once more, unless a weight has
            the name; an export has none of them.
        tiny: config.json of a model of some thousand parameters, for tests.
        other_architectures: classes whose weights are the same.
        base_prefix: first part of names that files of the bare model lack.
        ignored_tensors: patterns of tensors in old files that hold no weights.
        refused_tensors: pattern of tensors that files may hold, and the words for what they are and what to do.
        auto_class: class of transformers that loads a model with its heads from a folder.
        heads: patterns of Hugging Face names, one for each head that files of the bare encoder may lack.
        correct_config: config.json and names of the stored tensors -> config.json that fits them.
        notes: config.json -> one sentence on each key that changes training, but no weight and no logit, and that is
            not read.
        absent: key of config.json -> value that the config class of transformers gives a file without the key.
        without_effect: keys that change no logit in this family alone -> the reason.
        aliases: other name of a key, which transformers reads too -> the key.
        taken_for: Hugging Face name that files may lack -> the tensor that transformers takes in its place.
        wrapped_in: ``model_type``s of files that hold the family as ``text_config``, beside other parts.
        wrapped_names: first part of a tensor's name in such files -> the one here; empty for tensors of other parts.
        token_ids: config.json -> the keys about tokens that readers need, also where the file lacks them.
    """

    name: str
    model_type: str
    architecture: str
    read_config: Callable[[HubConfig], dict[str, Any]]
    write_config: Callable[[ModelConfig, int, int], dict[str, Any]]
    weights: Callable[[ModelConfig], Iterator[Weight]]
    tiny: Mapping[str, Any]
    copies: Callable[[ModelConfig], Iterator[Weight]] = _no_copies
    other_architectures: Sequence[str] = ()
    base_prefix: str = "model."
    word_table_copies: Sequence[str] = ("lm_head.weight",)
    ignored_tensors: Sequence[str] = (r".*\.rotary_emb\.inv_freq",)
    refused_tensors: Mapping[str, str] = field(default_factory=dict)
    auto_class: str = "AutoModelForCausalLM"
    heads: Sequence[str] = ()
    correct_config: Callable[[Mapping[str, Any], Collection[str]], Mapping[str, Any]] | None = None
    notes: Callable[[Mapping[str, Any]], Iterator[str]] = _no_notes
    absent: Mapping[str, Any] = field(default_factory=dict)
    without_effect: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    taken_for: Mapping[str, str] = field(default_factory=dict)
    wrapped_in: Sequence[str] = ()
    wrapped_names: Mapping[str, str] = field(default_factory=dict)
    token_ids: Callable[[Mapping[str, Any]], Mapping[str, int]] = _no_token_ids
