"""Meaning of ``cd`` before the training line: relative paths of flags are below that folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from posixpath import join, normpath

from llmctl.scripts.flag_meaning import FlagMeaning
from llmctl.scripts.shell.values import Value, missing_of, text_of
from trainer.config.blends import path_entries, weight_places

PATHS = (
    *("data.data_path", "data.train_data_path", "data.valid_data_path", "data.test_data_path", "data.data_cache_path"),
    *("data.tokenizer_model", "data.vocab_file", "data.merge_file", "checkpoint.save", "checkpoint.load"),
    *("logging.tensorboard_dir", "logging.wandb_save_dir"),
)
"""Keys that a flag of a script sets to paths."""
_BOUND = "././"
"""Beginning of a path that a script bound to its first folder, as ``$PWD/ck`` before a ``cd``."""


def bind(arguments: Sequence[Value], folder: Value) -> list[Value]:
    """The flags of a training line, in which paths that a later ``cd`` does not move are marked."""
    if not is_elsewhere(folder):
        return list(arguments)
    return [
        tuple(replace(chunk, text=_BOUND + chunk.text) if chunk.is_here else chunk for chunk in word)
        for word in arguments
    ]


def is_elsewhere(folder: Value) -> bool:
    """True for another folder than the one in which the script starts."""
    return bool(folder) and (missing_of(folder) is not None or normpath(text_of(folder)) != ".")


def put_folder(folder: Value, flags: FlagMeaning) -> None:
    """Put the relative paths of the flags below the folder in which the training program starts.

    A folder that only the job knows is told.
    """
    if not is_elsewhere(folder):
        return
    missing, moved = missing_of(folder), list[str]()
    line = folder[-1].line
    for key in PATHS:
        value = flags.values.get(key)
        entries = path_entries(value) if key.endswith("data_path") else [value]
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            continue
        weights = weight_places(entries) if key.endswith("data_path") else range(0)
        where = "." if missing is not None else text_of(folder)
        placed = [entry if place in weights else _placed(entry, where) for place, entry in enumerate(entries)]
        if any(place not in weights and _is_relative(entry) for place, entry in enumerate(entries)):
            moved.append(key)
        if placed != entries and (missing is None or any(entry.startswith(_BOUND) for entry in entries)):
            flags.values[key] = placed if isinstance(value, list) or len(placed) > 1 else placed[0]
            if key in flags.origins and key in moved:
                flags.origins[key] += f", below {where} (cd, line {line})"
    if missing is not None and moved:
        keys = f"{moved[0]} is" if len(moved) == 1 else f"{', '.join(moved[:-1])} and {moved[-1]} are"
        remedy = f"give it with --arg {missing.name}=VALUE, or " if missing.name else ""
        reason = f"only the job knows {missing.what}, so {keys} not below it; {remedy}write absolute paths"
        flags.remarks.append((missing.line, "cd", reason))


def _is_relative(entry: str) -> bool:
    return not entry.startswith(("/", "~", "${", _BOUND))


def _placed(entry: str, folder: str) -> str:
    if entry.startswith(_BOUND):
        return f"./{normpath(entry)}" if not normpath(entry).startswith("..") else normpath(entry)
    return normpath(join(folder, entry)) if _is_relative(entry) and folder != "." else entry
