"""Files beside the weights in a Hugging Face folder: tokenizer, generation settings, templates, licence."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainer.families.catalogue import text_part
from trainer.families.format.errors import FamilyError
from trainer.hub.errors import HubError

SIDE_FOLDER = "hugging_face"
"""Folder in a folder of checkpoints that keeps the files of the model they began from."""

_PATTERNS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "chat_template*", "LICENSE*", "NOTICE*"),
)
_CURRENT_CLASS, _OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"


def copy_side_files(source: Path, target: Path) -> list[str]:
    """Copy the files of ``source`` except weights; returns their names.

    Raises:
        OSError: a file cannot be read or written.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = sorted(entry.name for entry in source.iterdir() if entry.is_file() and _is_side_file(entry.name))
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def _is_side_file(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _PATTERNS)


def largest_vocabulary(folder: Path) -> tuple[Path, int] | None:
    """The file with the tokenizer's vocabulary, and the ids that it needs; None without tokenizer.json and vocab.json.

    Tokens that were added to the vocabulary do not count: published tokenizers have some that their model never meets.

    Raises:
        HubError: the file is damaged.
    """
    path = next((path for name in ("tokenizer.json", "vocab.json") if (path := folder / name).is_file()), None)
    if path is None:
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = values.get("model", {}).get("vocab", {}) if path.name == "tokenizer.json" else values
        if isinstance(vocabulary, list):
            return path, len(vocabulary)
        return path, max(vocabulary.values(), default=-1) + 1
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise HubError(f"{path}: cannot be read: {error}") from None


def side_config(checkpoint: Path) -> tuple[Path | None, dict[str, Any]]:
    """The side folder of a checkpoint, and the model's keys of its config.json; None and no keys if there is none."""
    folder = checkpoint.parent / SIDE_FOLDER
    try:
        keys = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return folder, text_part(keys, str(folder))[1]
    except (OSError, ValueError, AttributeError, FamilyError):
        return None, {}


def name_old_tokenizer_class(folder: Path) -> None:
    """Let tokenizer_config.json name a class that readers older than transformers 5 know.

    Raises:
        OSError: the file cannot be read or written.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    keys = json.loads(path.read_text(encoding="utf-8"))
    if keys.get("tokenizer_class") == _CURRENT_CLASS:
        path.write_text(json.dumps({**keys, "tokenizer_class": _OLD_CLASS}, indent=2) + "\n", encoding="utf-8")
