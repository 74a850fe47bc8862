"""The config file: choice, reading, and caution with a ``./llmctl.yaml`` that the user did not name.

A config can make a job run code of its author. A named file is the user's choice; a found file may be anyone's, as in a
shared folder or an unpacked archive.
"""

import grp
import json
import os
import pwd
import re
import stat
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from llmctl.context import Context
from llmctl.errors import ConfigFileError, UsageError
from llmctl.paths import BUNDLED, expand_home
from llmctl.submit.job import ConfigFile, Problem, SubmitArguments
from llmctl.submit.origins import Resolved
from trainer.config.errors import ConfigError
from trainer.config.paths.task_files import is_task_file
from trainer.config.train_config import TrainConfig
from trainer.config.yaml_file import read_yaml
from trainer.planning.build_config import build_config

DEFAULT_CONFIG = "llmctl.yaml"
_OTHER_SPELLING = "llmctl.yml"
EXAMPLE = "gpt_small.yaml"
FROM_PYTHON = "the config mapping"
"""Words for a config that no file has."""
_NO_SCRIPT = "--arg: goes with a training script; set a config's key with --set"
SCRIPT_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch", ".pbs", ".qsub", ".job", ".sge", ".lsf")
_LISTS_FLAGS = re.compile(rb"^MODEL_ARGS[ \t]*:", re.MULTILINE)
"""Of a file whose flags import-script reads; a training config has other sections."""


def read_config(context: Context, arguments: SubmitArguments) -> ConfigFile:
    """Choose and read the config file, or the training script in its place.

    Raises:
        UsageError: the named file does not exist, or --arg goes with no script.
        ConfigFileError: the file cannot be read.
    """
    if isinstance(arguments.config, Mapping):
        if arguments.script_arguments:
            raise UsageError(_NO_SCRIPT)
        if not all(isinstance(key, str) for key in arguments.config):
            raise ConfigFileError(f"{FROM_PYTHON}: is not a mapping of names to values")
        return ConfigFile(context.cwd / FROM_PYTHON, arguments.config, source=FROM_PYTHON)
    path, warning = find_config(context, arguments.config, example=arguments.example)
    warnings = (warning,) if warning else ()
    if is_script(path):
        from llmctl.scripts.import_script import import_script, parse_given

        named = arguments.config or str(path)
        given = parse_given(arguments.script_arguments)
        script = import_script(path, named, given, datetime.now(), context.environment)
        if script.ignored:
            count = "1 word has" if script.ignored == 1 else f"{script.ignored} words have"
            shown = f"{named}: {count} no effect here; llmctl import-script shows each with its reason"
            warnings = (*warnings, shown)
        warnings = (*warnings, *(f"{named}, {remark}" for remark in script.remarks))
        return ConfigFile(path, script.sections, warnings)
    if arguments.script_arguments:
        raise UsageError(_NO_SCRIPT)
    try:
        return ConfigFile(path, read_yaml(path), warnings)
    except ConfigError as error:
        raise ConfigFileError(f"{path}: {error.problem}") from None


def is_script(path: Path) -> bool:
    """True if a file is a shell script by its ending or first line, or lists flags under MODEL_ARGS."""
    if path.suffix in SCRIPT_ENDINGS:
        return True
    if not path.is_file() or not os.access(path, os.R_OK):
        return False
    if path.suffix in (".yaml", ".yml"):
        return _LISTS_FLAGS.search(path.read_bytes()) is not None
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def training_config(resolved: Resolved) -> TrainConfig:
    """Build the training config.

    Raises:
        UsageError, ConfigFileError: names the key and its flag or file.
    """
    try:
        return build_config(resolved.values)
    except ConfigError as error:
        problems = [Problem(each.key, each.problem, between_keys=True) for each in error.all]
        raise resolved.error(problems) from None


def find_config(context: Context, argument: str | None, *, example: bool = False) -> tuple[Path, str]:
    """The config file, and a warning if the user named no file.

    Args:
        context: the working directory.
        argument: CONFIG as typed; None without CONFIG.
        example: take the bundled example; there is no CONFIG then.

    Raises:
        UsageError: the named file does not exist, or the choice is not clear.
    """
    if argument is not None:
        path = context.cwd / expand_home(argument, context.folders)
        if is_hub_model(path):
            folder = argument if path.is_dir() else str(Path(argument).parent)
            raise UsageError(
                f"CONFIG: {argument} is a Hugging Face model; `llmctl submit --hf {folder} --data TEXT` trains it, "
                f"`llmctl init --from {folder}` writes a config for it"
            )
        if path.is_dir():
            raise UsageError(f"CONFIG: {argument} is a folder; name a config in it")
        if not path.is_file():
            raise UsageError(f"CONFIG: there is no file {argument}; name one, or leave it out for the bundled example")
        return path, ""
    own = None if example else found_config(context)
    if own is not None:
        return own, f"using ./{own.name}"
    bundled = BUNDLED / "examples" / EXAMPLE
    if not bundled.is_file():
        raise UsageError(f"CONFIG: there is no ./{DEFAULT_CONFIG} and no bundled example; name a config file")
    why = "" if example else f"no ./{DEFAULT_CONFIG}: "
    return bundled, f"{why}the bundled example {EXAMPLE}, on generated data"


def is_hub_model(path: Path) -> bool:
    """True for config.json of a Hugging Face model, or the folder that holds it."""
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json":
        return False
    try:
        return "model_type" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def found_config(context: Context) -> Path | None:
    """``./llmctl.yaml`` or ``./llmctl.yml``; None without them.

    Raises:
        UsageError: both are there.
    """
    found = [context.cwd / name for name in (DEFAULT_CONFIG, _OTHER_SPELLING) if (context.cwd / name).is_file()]
    if len(found) > 1:
        raise UsageError(f"CONFIG: there are ./{DEFAULT_CONFIG} and ./{_OTHER_SPELLING}; name the one to take")
    return found[0] if found else None


def found_config_warnings(context: Context, file: ConfigFile, values: Mapping[str, Any]) -> list[str]:
    """The file's warnings; of a found ``./llmctl.yaml`` with the keys by which it can run code of its author.

    Args:
        context: the working directory.
        file: the chosen file, which the user did not name.
        values: sections of the file. Read before this call: another user who changes the file in between owns it.

    Raises:
        ConfigFileError: it has such keys, and another user owns the file or can write to it.
    """
    path = file.path
    keys = list(_keys_that_run_code(values, context.cwd)) if path.parent == context.cwd else []
    if not keys:
        return list(file.warnings)
    listed = f"{', '.join(keys[:-1])} and {keys[-1]}" if len(keys) > 1 else keys[0]
    distrust = _distrust(path)
    if distrust:
        raise ConfigFileError(
            f"./{path.name}: {distrust}, and its {listed} can run its author's code as you\n"
            f"read it; to use it anyway, name it: llmctl submit {path.name}"
        )
    return [f"using ./{path.name}; its {listed} can run its author's code as you"]


def _keys_that_run_code(values: Mapping[str, Any], cwd: Path) -> Iterator[str]:
    job = _mapping(values.get("job"))
    code = [_from(cwd, str(place)) for place in _listed(job.get("code"))]
    tasks = [_from(cwd, str(task)) for task in _listed(_mapping(values.get("evaluation")).get("tasks"))]
    shown = {
        "job.code": code,
        "job.container": _listed(job.get("container")),
        "job.mounts": _listed(job.get("mounts")),
        "job.notify": _listed(job.get("notify")),
        "evaluation.tasks": [task for task in tasks if is_task_file(task)],
        "data.tokenizer_function": _listed(_mapping(values.get("data")).get("tokenizer_function")),
        "logging.trackers": _listed(_mapping(values.get("logging")).get("trackers")),
        **{f"hooks.{key}": _listed(value) for key, value in _mapping(values.get("hooks")).items() if key != "settings"},
    }
    for key, entries in shown.items():
        if entries:
            yield f"{key} ({', '.join(map(str, entries))})"
    # LD_PRELOAD, PATH, PYTHONPATH, BASH_ENV, NCCL_NET_PLUGIN, ...: no list of harmless variables is complete.
    yield from (f"job.env.{name}" for name in _mapping(job.get("env")))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def _from(cwd: Path, place: str) -> str:
    """A path below the working directory as ``./path``."""
    return f"./{Path(place).relative_to(cwd)}" if Path(place).is_relative_to(cwd) else place


def _distrust(path: Path) -> str:
    """Words on another user who owns the file, or a link to it, or who can write to it; empty without one."""
    facts = path.stat()
    for owner in (path.lstat().st_uid, facts.st_uid):
        if owner not in (0, os.geteuid()):
            return f"belongs to {_user(owner)}"
    others = stat.S_IWOTH if _is_only_mine(facts.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    if facts.st_mode & others:
        return f"other users can write to it (owner {_user(facts.st_uid)}, mode {stat.S_IMODE(facts.st_mode):o})"
    return ""


def _is_only_mine(group: int) -> bool:
    """True for a user's private group, whose umask is often 002: named like the user, and without other members."""
    try:
        own, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == own.pw_gid and found.gr_name == own.pw_name and not set(found.gr_mem) - {own.pw_name}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
