"""Which tokens of a vocabulary mean the end of a document, padding and so on: by what its files say, then by name."""

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
"""Names that published vocabularies give to tokens of each meaning, the most telling first."""

_KEYS = {role: f"{'eos' if role == 'eod' else role}_token" for role in NAMES}
_FILES = ("special_tokens_map.json", "tokenizer_config.json")


def sentinel_name(number: int) -> str:
    """T5's name of the token that stands for masked span ``number``."""
    return f"<extra_id_{number}>"


def declared_names(folder: Path) -> dict[str, str]:
    """Meaning -> name of the token, as transformers' files in ``folder`` say it.

    Raises:
        DataError: one of them is not JSON.
    """
    found: dict[str, str] = {}
    for name in _FILES:
        settings = read_json_beside(folder / name)
        for role, key in _KEYS.items():
            value = settings.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[role] = value
    return found


def read_json_beside(path: Path) -> dict[str, object]:
    """The object in ``path``; empty if there is no such file.

    Raises:
        DataError: it is there and holds no JSON object.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}; mend it or take it away") from None
    if not isinstance(settings, dict):
        raise DataError(f"{path}: holds no JSON object; mend it or take it away")
    return settings


def find_specials(
    id_of: Callable[[str], int | None],
    named: Mapping[str, int],
    by_id: Mapping[str, int],
    by_name: Mapping[str, str],
    eod_token: str | None,
    origin: str,
) -> SpecialTokens:
    """Ids of the special tokens.

    Args:
        id_of: id of any token by its name; None: there is none.
        named: ids of special tokens by their names. A name of NAMES may also be an ordinary piece, which text becomes.
        by_id: meaning -> id, where the vocabulary itself says it.
        by_name: meaning -> name, where files beside it say it; stronger than ``by_id``.
        eod_token: name of the token that ends a document, as the user gave it; None: not given.
        origin: the vocabulary's file, for messages.

    Raises:
        DataError: there is no token of the name that is to end a document.
    """
    wanted = dict(by_name)
    if eod_token is not None:
        wanted["eod"] = eod_token
    if "eod" in wanted and id_of(wanted["eod"]) is None:
        raise DataError(f"{origin}: has no token {wanted['eod']!r} to end a document with; name one that it has")
    ids: dict[str, int | None] = {}
    for role, names in NAMES.items():
        declared = id_of(wanted[role]) if role in wanted else None
        ids[role] = declared if declared is not None else by_id.get(role, _first(named, names))
    # As in Megatron-LM (megatron/core/tokenizers/text/libraries/huggingface_tokenizer.py): a BERT's documents end with
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
