"""Variables of the environment in the paths of a config: ``$SCRATCH/data`` and ``${SCRATCH}/data``. Torch-free.

They have their values on the machine that reads the config: at ``llmctl submit`` on the cluster's machine, in a trainer
that is started by hand on its own. A path whose variable is not set is refused; it would name another folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PATH_KEYS = frozenset(
    {
        "data.data_path",
        "data.train_data_path",
        "data.valid_data_path",
        "data.test_data_path",
        "data.tokenizer_model",
        "data.vocab_file",
        "data.merge_file",
        "data.data_cache_path",
        "checkpoint.save",
        "checkpoint.load",
        "model.from",
        "evaluation.tasks",
        "logging.tensorboard_dir",
        "logging.wandb_save_dir",
        "job.code",
    }
)
"""Keys whose values are paths, or lists of them: relative to the folder of their file."""
WITH_VARIABLES = PATH_KEYS | {"job.container", "job.mounts", "logging.mlflow_tracking_uri"}
"""Keys in which variables are replaced."""
HUB_KEYS = frozenset({"checkpoint.load", "model.from", "data.tokenizer_model"})
"""Keys that people give a name of the Hugging Face Hub."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([^{}]+)\})")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SECRET = re.compile(r"\w*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)")


def names_in(value: Any) -> list[str]:
    """Names of the variables in a path, or in a list of them; each once. In braces it may be no name."""
    texts = value if isinstance(value, list) else [value]
    found = [match for text in texts if isinstance(text, str) for match in _VARIABLE.finditer(text)]
    return list(dict.fromkeys(match[1] or match[2] for match in found))


def has_variables(key: str, value: Any) -> bool:
    """True if the value of a key has variables to be replaced; those of an image in a registry are not."""
    is_path = key != "job.container" or str(value).startswith(("/", "~", "$"))
    return key in WITH_VARIABLES and is_path and bool(names_in(value))


def variables_in(value: Any) -> list[str]:
    """The names of ``names_in`` whose values may be asked for: those that a variable can have, without secrets."""
    return [name for name in names_in(value) if _NAME.fullmatch(name) and not may_be_secret(name)]


def with_variables(value: Any, values: Mapping[str, str]) -> Any:
    """A path, or a list of them, with the variables that have a value; others stay as written, and so do secrets."""
    if isinstance(value, list):
        return [with_variables(entry, values) for entry in value]
    if not isinstance(value, str):
        return value

    def text_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return match[0] if may_be_secret(name) else values.get(name) or match[0]

    return _VARIABLE.sub(text_of, value)


def may_be_secret(name: str) -> bool:
    """True for a variable whose value no path and no record may show, by its name."""
    return _SECRET.fullmatch(name) is not None


def unset_problem(names: Sequence[str], machine: str) -> str:
    """The sentence on variables of one path that have no value.

    Args:
        names: of the variables; at least one.
        machine: where they were looked for, such as "this machine".
    """
    if strange := [name for name in names if not _NAME.fullmatch(name)]:
        return f"${{{strange[0]}}} is not a variable of the environment; write $NAME or ${{NAME}}"
    if secret := [name for name in names if may_be_secret(name)]:
        return f"${secret[0]} may be a secret, which no path may show; give the path itself"
    shown = " and ".join(f"${name}" for name in names)
    return f"{shown} {'are' if names[1:] else 'is'} not set on {machine}; export it there, or give the path itself"


def replace_variables(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The values of a config, section -> key -> value, in whose paths the variables that are set have their values."""
    replaced = dict(values)
    for key, value in _paths(values):
        section, _, name = key.partition(".")
        replaced[section] = {**replaced[section], name: with_variables(value, environment)}
    return replaced


def check_no_variables(values: Mapping[str, Any]) -> None:
    """Refuse paths with variables, which are not set on this machine.

    Raises:
        ConfigError: all keys with one.
    """
    from trainer.config.errors import ConfigError, joined  # Not at load: every submission imports this file.

    found = [(key, names_in(value)) for key, value in _paths(values)]
    if found:
        raise joined(ConfigError(key, unset_problem(names, "this machine")) for key, names in found)


def _paths(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Key and value of each path with variables, in the order of their keys."""
    for key in sorted(WITH_VARIABLES):
        section, _, name = key.partition(".")
        named = values.get(section)
        if isinstance(named, Mapping) and has_variables(key, named.get(name)):
            yield key, named[name]
