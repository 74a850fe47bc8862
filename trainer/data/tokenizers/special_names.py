"""Special tokens of a vocabulary, by its files' declarations, then by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.data.errors import DataError
from trainer.data.tokenizers.tokenizer import SpecialTokens

NAMES: dict[str, tuple[str, ...]] = {
    "eod": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "<eod>", "<EOD>"),
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<BOS>", "[BOS]"),
    "pad": ("<pad>", "[PAD]", "<PAD>", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"),
    "cls": ("[CLS]", "<cls>", "<CLS>", "<|cls|>"),
    "sep": ("[SEP]", "<sep>", "<SEP>", "<|sep|>"),
    "mask": ("[MASK]", "<mask>", "<MASK>", "<|mask|>"),
    "unk": ("[UNK]", "<unk>", "<UNK>"),
}
"""Names of tokens of each meaning in published vocabularies, the least ambiguous first."""

_KEYS = {role: f"{'eos' if role == 'eod' else role}_token" for role in NAMES}
_FILES = ("special_tokens_map.json", "tokenizer_config.json")


def sentinel_name(number: int) -> str:
    """Return T5's name of the token that stands for masked span ``number``."""
    return f"<extra_id_{number}>"


def declared_names(folder: Path) -> dict[str, str]:
    """Return meaning -> name of a token, as declared in transformers' files in ``folder``.

    Raises:
        DataError: a file is not JSON.
    """
    found: dict[str, str] = {}
    for name in _FILES:
        found |= names_in(read_json_beside(folder / name))
    return found


def names_in(settings: Mapping[str, object]) -> dict[str, str]:
    """Return meaning -> name of a token, as declared in the content of such a file."""
    found: dict[str, str] = {}
    for role, key in _KEYS.items():
        value = settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[role] = value
    return found


def read_json_beside(path: Path) -> dict[str, object]:
    """Return the object in ``path``; empty without the file.

    Raises:
        DataError: the file holds no JSON object.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}; repair or remove it") from None
    if not isinstance(settings, dict):
        raise DataError(f"{path}: holds no JSON object; repair or remove it")
    return settings


def find_specials(
    id_of: Callable[[str], int | None],
    named: Mapping[str, int],
    by_id: Mapping[str, int],
    by_name: Mapping[str, str],
    eod_token: str | None,
    origin: str,
) -> SpecialTokens:
    """Find the ids of the special tokens.

    Args:
        id_of: returns the id of any token by its name; None for an unknown name.
        named: ids of special tokens by name. A name of NAMES may also be an ordinary piece of text.
        by_id: meaning -> id, declared by the vocabulary itself.
        by_name: meaning -> name, declared by files beside it; overrides ``by_id``.
        eod_token: name of the token that ends a document, from the user; None if not given.
        origin: the vocabulary's file, for messages.

    Raises:
        DataError: the vocabulary has no token with the requested name for the end of a document.
    """
    wanted = dict(by_name)
    if eod_token is not None:
        wanted["eod"] = eod_token
    if "eod" in wanted and id_of(wanted["eod"]) is None:
        raise DataError(f"{origin}: has no token {wanted['eod']!r} to end a document with; name an existing token")
    ids: dict[str, int | None] = {}
    for role, names in NAMES.items():
        declared = id_of(wanted[role]) if role in wanted else None
        ids[role] = declared if declared is not None else by_id.get(role, _first(named, names))
    # As in Megatron-LM (megatron/core/tokenizers/text/libraries/huggingface_tokenizer.py): documents for BERT end with
    # [SEP] and begin with [CLS].
    eod = ids["eod"] if ids["eod"] is not None else ids["sep"]
    bos = ids["bos"] if ids["bos"] is not None else ids["cls"]
    return SpecialTokens(eod, bos, ids["pad"], ids["cls"], ids["sep"], ids["mask"], ids["unk"], _sentinels(named))


def _first(named: Mapping[str, int], names: Sequence[str]) -> int | None:
    return next((named[name] for name in names if name in named), None)


def _sentinels(named: Mapping[str, int]) -> tuple[int, ...]:
    found: list[int] = []
    while (token := named.get(sentinel_name(len(found)))) is not None:
        found.append(token)
    return tuple(found)
