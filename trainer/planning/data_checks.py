"""Incompatible keys of the data section. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.blends import PATH_KEYS, SPLIT_PATH_KEYS, parse_blend, parse_split, weight_places
from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.sections.data import DataConfig
    from trainer.config.train_config import TrainConfig

STREAMING_KEYS = ("streaming_key", "streaming_text_document", "streaming_on_error", "streaming_buffer_mib")


def check_data(config: TrainConfig) -> None:
    """Refuse contradicting keys of the data section.

    Raises:
        ConfigError: names the key and the remedy.
    """
    data = config.data
    sources = [name for name in ("data_path", "train_data_path", "mock_data") if getattr(data, name)]
    if len(sources) > 1:
        raise ConfigError(
            f"data.{sources[1]}",
            f"cannot be combined with data.{sources[0]}; set only one of the two: null unsets a path",
        )
    _check_user_dataset(config)
    _check_user_tokenizer(config)
    for name in PATH_KEYS:
        parse_blend(f"data.{name}", getattr(data, name))
    for name in SPLIT_PATH_KEYS[1:]:
        if getattr(data, name) and not data.train_data_path:
            raise ConfigError(
                f"data.{name}", "needs data.train_data_path, which is unset; set it, or use data.data_path"
            )
    train_share, _, _ = parse_split(data.split)
    if data.data_path and not train_share:
        raise ConfigError("data.split", f"{data.split!r} leaves nothing to train on; make the first share more than 0")
    _check_packing(data)
    _check_streaming(data)


def _check_user_dataset(config: TrainConfig) -> None:
    if config.hooks.dataset_function is None:
        return
    if config.model.architecture != "decoder":
        raise ConfigError(
            "hooks.dataset_function", "needs model.architecture decoder; name prepared data in data.data_path"
        )
    others = (*PATH_KEYS, "mock_data", "streaming", "sample_packing", "answer_only_loss")
    also = [name for name in others if getattr(config.data, name)]
    if config.data.sample_order != "stable":
        also.append("sample_order")
    if also:
        raise ConfigError(
            f"data.{also[0]}",
            "cannot be combined with hooks.dataset_function, which gives all samples; leave out one of them",
        )


def _check_user_tokenizer(config: TrainConfig) -> None:
    data = config.data
    if data.tokenizer_function is None:
        return
    if config.model.architecture != "decoder":
        raise ConfigError(
            "data.tokenizer_function",
            "needs model.architecture decoder, since bert and t5 mask whole words, which only a tokenizer's files "
            "show; name these in data.tokenizer_model",
        )
    files = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    tokens = ("vocab_extra_ids", "tokenizer_special_tokens", "tiktoken_pattern", "eod_token")
    also = [name for name in (*files, *tokens) if getattr(data, name)]
    if also:
        raise ConfigError(
            f"data.{also[0]}",
            "cannot be combined with data.tokenizer_function; leave out one of them",
        )


def _check_streaming(data: DataConfig) -> None:
    if not data.streaming:
        fields = type(data).model_fields
        set_anyway = [key for key in STREAMING_KEYS if getattr(data, key) != fields[key].default]
        if set_anyway:
            raise ConfigError(f"data.{set_anyway[0]}", "needs data.streaming, which is off; switch it on")
        return
    if data.mock_data:
        raise ConfigError("data.streaming", "cannot be combined with data.mock_data; set only one of the two")
    if data.sample_packing:
        raise ConfigError(
            "data.sample_packing",
            "needs prepared data, not data.streaming; run llmctl data prepare first",
        )
    if data.sample_order == "megatron":
        raise ConfigError("data.sample_order", "megatron needs prepared data; use stable with data.streaming")
    is_named = data.tokenizer_model or data.vocab_file or data.tokenizer_function
    if not (is_named or data.tokenizer_type == "NullTokenizer"):
        raise ConfigError("data.tokenizer_model", "is unset, but data.streaming needs it; name the tokenizer's files")
    for name in PATH_KEYS:
        if weight_places(getattr(data, name)):
            raise ConfigError(
                f"data.{name}", "cannot have weights with data.streaming; leave them out, or prepare the data"
            )


def _check_packing(data: DataConfig) -> None:
    if data.answer_only_loss and not data.sample_packing:
        raise ConfigError(
            "data.answer_only_loss", "needs data.sample_packing, which keeps documents whole; switch it on"
        )
    if not data.sample_packing:
        return
    if data.mock_data:
        raise ConfigError("data.sample_packing", "cannot pack data.mock_data; name prepared data in data.data_path")
    if data.sample_order == "megatron":
        raise ConfigError(
            "data.sample_order", "megatron cuts documents between samples; use stable with data.sample_packing"
        )
