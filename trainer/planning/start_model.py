"""The model of the checkpoint that a run starts from, as the base of the config's section ``model``. Torch-free.

llmctl reads the files over its transport, on the machine that has them, and the trainer on its own disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from trainer.config.errors import ConfigError
from trainer.config.foreign_formats import HUB_CONFIG, NATIVE_METADATA, Listing, format_of
from trainer.config.sections.model import ModelConfig
from trainer.families.catalogue import TUNABLE, differences, published_model, read_model
from trainer.families.format.errors import FamilyError
from trainer.families.gguf.header import MAGIC, read_header
from trainer.families.gguf.keys import published_keys
from trainer.families.gguf.tokenizer import tokenizer_problem

FROM = "from"
"""Key of the section ``model`` that names a model to take the shape from, without its weights."""
_ITERATION = re.compile(r"iter_\d{7,}")
_INDEXES, _SINGLE = ("model.safetensors.index.json", "pytorch_model.bin.index.json"), "model.safetensors"
_SIDE_FOLDER = "hugging_face"
_TOKENIZER_FILES = (
    {"tokenizer.json"},
    {"tokenizer.model"},
    {"vocab.json", "merges.txt"},
    {"vocab.txt"},
    {"spiece.model"},
    {"tekken.json"},
)
_TOKENIZER_KEYS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
_LONGEST_HEADER = 100 << 20
"""Largest header of a safetensors file, by the format's own rule."""


class Files(Protocol):
    """Files of the machine that has the checkpoint."""

    def names(self, folder: str) -> Collection[str]:
        """Names in a folder; empty if there is no such folder."""

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """Bytes of a file; None if there is no such file, or if it cannot be read."""


class LocalFiles:
    """Files of this machine."""

    def __init__(self, base: Path = Path()) -> None:
        """Look below ``base`` for relative paths."""
        self._base = base

    def names(self, folder: str) -> Collection[str]:
        """See Files."""
        try:
            return [entry.name for entry in self._place(folder).iterdir()]
        except OSError:
            return []

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """See Files."""
        try:
            with self._place(path).open("rb") as file:
                file.seek(offset)
                return file.read(-1 if limit is None else limit)
        except OSError:
            return None

    def _place(self, path: str) -> Path:
        return self._base / Path(path).expanduser()


@dataclass(frozen=True)
class StartModel:
    """A model that a run can start from.

    Attributes:
        where: file that describes it, for messages.
        values: keys of the section ``model`` that differ from their defaults, with the rows of the vocabulary tables.
        tokenizer: folder with its tokenizer's files, or file that holds it; None without one.
        no_tokenizer: why a file that holds a tokenizer gives none, as the start of a sentence; empty otherwise.
    """

    where: str
    values: Mapping[str, Any]
    tokenizer: str | None
    no_tokenizer: str = ""

    def without_end_token(self) -> StartModel:
        """The model with a NullTokenizer's number of token ids, which leaves out the one that ends documents."""
        return replace(self, values={**self.values, "vocab_size": self.values["vocab_size"] - 1})


@dataclass(frozen=True)
class Started:
    """Values of a config, laid over the model that the run starts from.

    Attributes:
        values: all sections, complete.
        taken: dotted key -> file that its value comes from, of the keys that the config does not set.
        problems: dotted key and sentence, of the keys that make another model of the weights or name no tokenizer.
    """

    values: Mapping[str, Any]
    taken: Mapping[str, str]
    problems: list[ConfigError]


def lay_over_start(values: Mapping[str, Any], files: Files) -> Started:
    """Lay a config's values over the model of ``model.from`` or ``checkpoint.load``.

    Without these keys, or with a folder that holds no model yet, the values stay as they are.

    Args:
        values: nested, as in a config file; ``~`` is expanded in the paths.
        files: of the machine that has the paths.

    Raises:
        ConfigError: the model cannot be read, or the section ``model`` is needed and there is no model to take it from.
    """
    if not isinstance(values.get("model", {}), Mapping | None):
        return Started(values, {}, [])  # the config's own check says so
    model, checkpoint, data = (section_of(values, name) for name in ("model", "checkpoint", "data"))
    named = {"model.from": model.pop(FROM, None), "checkpoint.load": checkpoint.get("load")}
    _check_paths(named)
    shape, load = named.values()
    found = {key: named_model(key, path, files) for key, path in named.items() if path}
    if data.get("tokenizer_type") == "NullTokenizer" and not data.get("mock_data"):
        found = {key: start and start.without_end_token() for key, start in found.items()}
    base = found.get("model.from") or found.get("checkpoint.load")
    if shape and not found["model.from"]:
        raise ConfigError("model.from", f"there is no model in {shape}; {_NAME_ONE}")
    if base is None:
        if load and not {"num_layers", "hidden_size"} & model.keys():
            raise ConfigError(
                "checkpoint.load", f"there is no model in {load} to take the section model from; {_NAME_ONE}"
            )
        return Started(values, {}, [])
    given = {key: value for key, value in model.items() if value is not None}
    loaded = found.get("checkpoint.load")
    problems = []
    if loaded is not None:
        ours = given if loaded is base else {**base.values, **given}
        may_differ = TUNABLE if checkpoint.get("finetune") in (True, "true", "True") else frozenset[str]()
        problems = list(other_model(loaded, ours, may_differ))
    if base.no_tokenizer and data.get("tokenizer_model") == base.where:
        text = f"{base.where}: {base.no_tokenizer}; name the file of the tokenizer"
        problems.append(ConfigError("data.tokenizer_model", text))
    taken = {f"model.{key}": base.where for key in base.values if key not in given}
    merged = {**values, "model": {**base.values, **given}}
    if base.tokenizer and _needs_tokenizer(data):
        merged["data"] = {**data, "tokenizer_model": base.tokenizer}
        taken["data.tokenizer_model"] = base.where
    return Started(merged, taken, problems)


def _check_paths(named: Mapping[str, Any]) -> None:
    for key, path in named.items():
        if path is not None and not isinstance(path, str):
            raise ConfigError(key, f"{path!r} is not a path; {_NAME_ONE}")


_NAME_ONE = "name a Hugging Face folder, a GGUF file or a folder of checkpoints"


def completed(values: Mapping[str, Any], files: Files) -> Mapping[str, Any]:
    """The values, laid over the model that the run starts from.

    Raises:
        ConfigError: see lay_over_start; or keys make another model of the weights, all of them in one sentence.
    """
    started = lay_over_start(values, files)
    if started.problems:
        first, *others = started.problems
        raise ConfigError(first.key, "; ".join([first.problem, *map(str, others)]))
    return started.values


def section_of(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of a section; empty for one that is missing or not a mapping, which the config's own check tells."""
    section = values.get(name)
    return dict(section) if isinstance(section, Mapping) else {}


def _needs_tokenizer(data: Mapping[str, Any]) -> bool:
    """True for a config with data of its own that names no tokenizer."""
    has_data = any(data.get(key) for key in ("data_path", "train_data_path"))
    return has_data and not data.get("mock_data") and not any(data.get(key) for key in _TOKENIZER_KEYS)


def named_model(key: str, path: str, files: Files) -> StartModel | None:
    """The model at the path that ``key`` names; None if there is none. See read_start_model.

    Raises:
        ConfigError: the file that describes the model is damaged, or its model is not known here.
    """
    try:
        return read_start_model(path, files)
    except FamilyError as error:
        raise ConfigError(key, str(error)) from None


def read_start_model(path: str, files: Files) -> StartModel | None:
    """The model of a Hugging Face folder, a GGUF file or a folder of checkpoints; None if the path holds none.

    Args:
        path: the folder or file.
        files: of its machine.

    Raises:
        FamilyError: the file that describes the model is damaged, or its model is not known here.
    """
    names = files.names(path)
    iterations = sorted(name for name in names if _ITERATION.fullmatch(name))
    for name in reversed(iterations):
        text = files.read(f"{path}/{name}/{NATIVE_METADATA}")
        if text is not None:
            return _of_checkpoint(path, names, f"{path}/{name}/{NATIVE_METADATA}", text, files)
    if not names and is_gguf(path, files):
        return _of_gguf(path, files)
    if HUB_CONFIG not in names:
        return None
    where = f"{path}/{HUB_CONFIG}"
    text = files.read(where)
    if text is None or format_of(Listing(names, config=text.decode(errors="replace"))) is None:
        return None
    _, _, model = published_model(_json(text, where), where, lambda: tensor_names(path, names, files))
    values = model.model_dump(exclude_defaults=True)
    return StartModel(where, values, path if _has_tokenizer(names) else None)


def is_gguf(path: str, files: Files) -> bool:
    """True if ``path`` is a GGUF file, by its first bytes."""
    return files.read(path, 0, len(MAGIC)) == MAGIC


def tensor_names(path: str, names: Collection[str], files: Files) -> Collection[str]:
    """Names of the tensors in a Hugging Face folder, from its index or the header of its single file.

    Empty if the folder has neither, as with a single pytorch_model.bin.

    Raises:
        FamilyError: the index is damaged.
    """
    if index := next((name for name in _INDEXES if name in names), None):
        where = f"{path}/{index}"
        found = _json(files.read(where) or b"", where).get("weight_map")
        return found if isinstance(found, Mapping) else {}
    size = files.read(f"{path}/{_SINGLE}", 0, 8) if _SINGLE in names else None
    if size is None or len(size) < 8:
        return {}
    length = min(int.from_bytes(size, "little"), _LONGEST_HEADER)
    return _json(files.read(f"{path}/{_SINGLE}", 8, length) or b"", f"{path}/{_SINGLE}")


def _of_gguf(path: str, files: Files) -> StartModel:
    def read(offset: int, limit: int) -> bytes:
        return files.read(path, offset, limit) or b""

    header = read_header(path, read)
    keys = published_keys(header, path, read)
    # Checked when the weights are read: the file has other names of tensors than the family.
    _, model = read_model(keys, path)
    problem = tokenizer_problem(header.metadata, keys["vocab_size"]) or ""
    return StartModel(path, model.model_dump(exclude_defaults=True), None if problem else path, problem)


def _of_checkpoint(path: str, names: Collection[str], where: str, text: bytes, files: Files) -> StartModel:
    metadata = _json(text, where)
    config, vocab_size = metadata.get("config"), metadata.get("vocab_size")
    if not isinstance(config, Mapping) or not isinstance(vocab_size, int) or not (stored := config.get("model")):
        raise FamilyError(f"{where}: has no model section; the file is damaged, or of another program")
    known = {key: value for key, value in stored.items() if key in ModelConfig.model_fields}
    try:
        model = ModelConfig(**known)
    except ValidationError:
        raise FamilyError(f"{where}: has a model section that cannot be read; it is of another release") from None
    values = model.model_dump(exclude_defaults=True)
    values["vocab_size"] = vocab_size
    values.setdefault("max_position_embeddings", section_of(config, "training").get("seq_length"))
    side = f"{path}/{_SIDE_FOLDER}"
    has_tokenizer = _SIDE_FOLDER in names and _has_tokenizer(files.names(side))
    return StartModel(where, values, side if has_tokenizer else None)


def _has_tokenizer(names: Collection[str]) -> bool:
    return any(files <= set(names) for files in _TOKENIZER_FILES) or any(name.endswith(".tiktoken") for name in names)


def _json(text: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise FamilyError(f"{where}: is damaged: {error}") from None
    if not isinstance(values, dict):
        raise FamilyError(f"{where}: is damaged: it is not a JSON object")
    return values


def other_model(start: StartModel, ours: Mapping[str, Any], may_differ: Collection[str]) -> Iterator[ConfigError]:
    """One problem for each key by which the config makes another model of the weights."""
    theirs = ModelConfig(**start.values)
    for key, value in ours.items():
        if key in may_differ or key not in ModelConfig.model_fields:
            continue
        try:
            changed = ModelConfig(**{**start.values, key: value})
        except ValidationError:
            # The config's own check names the key and what is valid.
            continue
        other = {found for found, *_ in differences(theirs, changed)}
        if other - set(may_differ) or _other_rows(theirs, changed):
            has = getattr(theirs, key)
            yield ConfigError(
                f"model.{key}", f"is {getattr(changed, key)}, but {start.where} has {has}; remove the key"
            )


def _other_rows(one: ModelConfig, other: ModelConfig) -> bool:
    """True if the tables of words or learned positions have other rows."""
    is_learned = one.position_embedding_type == "learned_absolute"
    rows = [(model.vocab_size, model.max_position_embeddings if is_learned else None) for model in (one, other)]
    return rows[0] != rows[1]
