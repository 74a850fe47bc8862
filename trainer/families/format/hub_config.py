"""config.json of a Hugging Face folder: each key is read, has no effect, or is refused by name. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainer.families.format.errors import FamilyError

WITHOUT_EFFECT = frozenset(
    [
        "_attn_implementation",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
    ]
)
"""Keys about decoding, labels and the library. They change no weight and no logit; an export carries them through."""


class HubConfig:
    """Reader of one config.json. A key that nobody has read is refused at the end."""

    def __init__(self, keys: Mapping[str, Any], where: str):
        """Wrap the keys of the file named ``where``."""
        self.where = where
        self._keys = dict(keys)
        self._read: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """The value of ``key``; ``default`` if it is absent or null."""
        self._read.add(key)
        value = self._keys.get(key)
        return default if value is None else value

    def given(self, key: str, absent: Any) -> Any:
        """The value of ``key``, which may be null; ``absent`` if the file lacks the key."""
        self._read.add(key)
        return self._keys.get(key, absent)

    def need(self, key: str) -> Any:
        """The value of ``key``.

        Raises:
            FamilyError: the key is absent or null.
        """
        value = self.take(key)
        if value is None:
            raise FamilyError(f"{self.where}: has no key {key}, which this family needs")
        return value

    def only(self, key: str, *valid: Any) -> None:
        """Accept ``key`` only with one of these values; the first is the value of an absent key.

        Raises:
            FamilyError: another value, which this trainer cannot compute.
        """
        value = self.take(key, valid[0])
        if value not in valid:
            listed = " or ".join(map(repr, valid))
            raise FamilyError(f"{self.where}: {key} is {value!r}, but this trainer computes only {listed}")

    def ignore(self, *keys: str) -> None:
        """Mark keys that have no effect in this family."""
        self._read.update(keys)

    def finish(self) -> None:
        """Check that every key was read.

        Raises:
            FamilyError: names the keys that nobody has read.
        """
        unknown = sorted(
            key for key in self._keys.keys() - self._read - WITHOUT_EFFECT if not _is_unset(self._keys[key])
        )
        if unknown:
            raise FamilyError(
                f"{self.where}: the meaning of {', '.join(unknown)} is unknown, and leaving it out could change "
                "the model; remove the key if it has no effect on the model"
            )


def _is_unset(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, Collection) and not value)
