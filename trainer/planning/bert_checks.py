"""Settings that contradict BERT, or any masked language model (BERT, T5), each with its error message. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


def _is_bert(config: TrainConfig) -> bool:
    return config.model.architecture == "bert"


def _is_changed(section: str, key: str, config: TrainConfig) -> bool:
    values = getattr(config, section)
    return bool(getattr(values, key) != type(values).model_fields[key].default)


def _is_changed_with_bert(section: str, key: str, config: TrainConfig) -> bool:
    return _is_bert(config) and _is_changed(section, key, config)


def _is_changed_with_masked(key: str, config: TrainConfig) -> bool:
    return config.model.architecture != "decoder" and _is_changed("data", key, config)


def _is_changed_without_masked(key: str, config: TrainConfig) -> bool:
    return config.model.architecture == "decoder" and _is_changed("data", key, config)


def _is_changed_without_bert(section: str, key: str, config: TrainConfig) -> bool:
    return not _is_bert(config) and _is_changed(section, key, config)


# Keys that only BERT has.
_ONLY_BERT = (
    ("model", "num_tokentypes"),
    ("model", "bert_binary_head"),
)
# Keys of section data that only masked language models have.
_ONLY_MASKED = ("mask_prob", "short_seq_prob")
# Keys that BERT does not have, and the remedy.
_NOT_BERT = (
    ("parallel", "sequence_parallel", "whose binary head needs the first token of whole sequences; switch it off"),
    ("model", "num_experts", "which is trained without experts here; leave it out"),
    ("model", "multi_latent_attention", "which has no latent attention here; switch it off"),
    ("model", "embedding_size", "whose head is as wide as the hidden size here; leave it out"),
    ("model", "swiglu", "whose head has no gates; switch it off"),
    ("model", "gated_linear_unit", "whose head has no gates; switch it off"),
)
# Keys of section data that masked language models do not have, and the remedy.
_NOT_MASKED = (
    ("streaming", "which need prepared sentences; use llmctl data prepare --split-sentences"),
    ("sample_packing", "whose samples are sentences of one document; switch it off"),
    ("eod_mask_loss", "whose samples hold no end of a document; switch it off"),
    ("reset_attention_mask", "whose samples hold one document; switch it off"),
    ("reset_position_ids", "whose samples hold one document; switch it off"),
)

OF_BERT: tuple[tuple[str, Callable[[TrainConfig], bool], str], ...] = (
    *(
        (
            f"{section}.{key}",
            partial(_is_changed_without_bert, section, key),
            "needs model.architecture bert; set it, or leave this key out",
        )
        for section, key in _ONLY_BERT
    ),
    *(
        (
            f"{section}.{key}",
            partial(_is_changed_with_bert, section, key),
            f"does not fit model.architecture bert, {why}",
        )
        for section, key, why in _NOT_BERT
    ),
    *(
        (
            f"data.{key}",
            partial(_is_changed_without_masked, key),
            "needs model.architecture bert or t5; set one of them, or leave this key out",
        )
        for key in _ONLY_MASKED
    ),
    *(
        (
            f"data.{key}",
            partial(_is_changed_with_masked, key),
            f"does not fit model.architecture bert and t5, {why}",
        )
        for key, why in _NOT_MASKED
    ),
    (
        "model.num_tokentypes",
        lambda c: _is_bert(c) and c.model.bert_binary_head and c.model.token_types < 2,
        "must be 2 or more with bert_binary_head, whose samples have two parts; leave it out, or switch "
        "bert_binary_head off",
    ),
    (
        "model.norm_placement",
        lambda c: _is_bert(c) and c.model.norm_placement not in ("pre", "post"),
        "must be post (BERT) or pre (Megatron-LM's BERT) with model.architecture bert; change it",
    ),
    (
        "model.has_final_norm",
        lambda c: _is_bert(c) and c.model.has_final_norm != (c.model.norm_placement == "pre"),
        "must be on with norm_placement pre, and off with post, whose last layer ends with a norm, in a model of "
        "architecture bert; change it",
    ),
    (
        "model.attention_backend",
        lambda c: _is_bert(c) and c.model.attention_backend == "flash",
        "flash has no padding mask, which model.architecture bert needs; use auto, fused or unfused",
    ),
)
"""Rows as in trainer.planning.incompatible.IMPOSSIBLE."""


def check_bert(config: TrainConfig) -> None:
    """Refuse a combination that contradicts BERT, or any masked language model.

    Raises:
        ConfigError: names the key, and the remedy.
    """
    for key, is_asked_for, sentence in OF_BERT:
        if is_asked_for(config):
            raise ConfigError(key, sentence)
