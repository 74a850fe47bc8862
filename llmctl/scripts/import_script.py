"""A training script as one config of this trainer. The script is read, never executed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmctl.errors import UsageError
from llmctl.scripts.beside import FilesBeside, unread_files
from llmctl.scripts.choices import base_width_asked, divide_fp8, put_bf16, tell_rules_of_mup, with_base_width
from llmctl.scripts.config_text import render_config
from llmctl.scripts.directives import JobWord, folder_of, read_directives
from llmctl.scripts.errors import ScriptError, all_problems
from llmctl.scripts.flag_group import FlagGroup, group_flags, name_open_values
from llmctl.scripts.flag_meaning import FlagMeaning, architecture_of, line_of, open_split_files, questions, read_flags
from llmctl.scripts.folder_meaning import bind, put_folder
from llmctl.scripts.idle_flags import drop_idle
from llmctl.scripts.job_meaning import JobMeaning, job_meaning, size_of
from llmctl.scripts.launch_line import LaunchLine, read_launch_line
from llmctl.scripts.model_config import script_of_config
from llmctl.scripts.outside import Surroundings, outside_value
from llmctl.scripts.program_meaning import put_program
from llmctl.scripts.questions import TRAINING_LINE, ask, check_given, last_words_of, with_further
from llmctl.scripts.shell.command_reader import read_script as read_commands
from llmctl.scripts.shell.interpreter import Interpreter, World
from llmctl.scripts.shell.started import Started
from llmctl.scripts.shell.state import Run
from llmctl.scripts.shell.values import Value, missing_of, plain, text_of
from llmctl.scripts.start_meaning import put_start
from trainer.config.errors import ConfigError
from trainer.planning.build_config import build_config

_MAX_BYTES = 1_000_000
_MOST_ARGUMENTS = 16
_GIVEN = re.compile(r"([A-Za-z_][\w-]*|[1-9]\d*)=(.*)", re.DOTALL)


class _EndsEarly(ScriptError):
    """The script's own exit comes before a training line."""


@dataclass(frozen=True)
class ImportedScript:
    """A script as a config.

    Attributes:
        sections: section -> key -> value, in plain values.
        text: the YAML file, with the origin of every line.
        ignored: number of words of the script without effect here.
        remarks: sentences on what differs from Megatron-LM, to be told before the job is queued.
    """

    sections: Mapping[str, Mapping[str, Any]]
    text: str
    ignored: int
    remarks: tuple[str, ...] = ()


def parse_given(arguments: Sequence[str]) -> dict[str, str]:
    """Values of ``--arg NAME=VALUE``; a number names an argument of the script.

    Raises:
        UsageError: an argument has another form.
    """
    found = {}
    for argument in arguments:
        match = _GIVEN.fullmatch(argument)
        if match is None:
            raise UsageError(
                f"--arg {argument}: give NAME=VALUE for a variable or a flag, or 1=VALUE for the script's argument $1"
            )
        found[match[1]] = match[2]
    return found


def import_script(
    path: Path,
    shown: str,
    given: Mapping[str, str],
    now: datetime,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ImportedScript:
    """Read a script as a config.

    Args:
        path: of the script.
        shown: its name in messages.
        given: variables that the script leaves open; see parse_given.
        now: the time that ``date`` in the script prints.
        environment: of the user, for the variables that the script does not set.

    Raises:
        UsageError: the script cannot be read, or asks for something else than this trainer does; with the line.
    """
    try:
        text = _read_text(path, given)
        try:
            return _import(text, path, given, now, environment)
        except ScriptError as error:
            raise with_further(
                error, text, lambda answers: _error_with(text, path, {**given, **answers}, now, environment)
            ) from None
    except ScriptError as error:
        raise error.within(shown) from None
    except RecursionError:
        raise UsageError(f"{shown}: its commands are nested too deeply to be read") from None


def _error_with(
    text: str, path: Path, given: Mapping[str, str], now: datetime, environment: Mapping[str, str]
) -> ScriptError | None:
    """The error of a script with further answers, if there is one."""
    try:
        _import(text, path, given, now, environment)
    except ScriptError as error:
        return error
    return None


def _read_text(path: Path, given: Mapping[str, str]) -> str:
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else None
    except OSError as error:
        raise ScriptError(0, f"cannot be read: {error.strerror}") from None
    if data is None:
        raise ScriptError(0, f"has more than {_MAX_BYTES:,} bytes, which no training script has")
    if b"\0" in data:
        raise ScriptError(0, "is a binary file, not a shell script")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ScriptError(data[: error.start].count(b"\n") + 1, "has bytes that are not UTF-8 text") from None
    script = script_of_config(text, path, given)
    return text if script is None else script


def launch_line_of(path: Path, given: Mapping[str, str], now: datetime) -> LaunchLine:
    """The script's only command that trains; arguments and errors as in import_script."""
    return _read(_read_text(path, given), path, given, now, Surroundings({})).launch


def flags_of(path: Path, given: Mapping[str, str], now: datetime) -> list[FlagGroup]:
    """The flags of a script's training line; arguments and errors as in import_script."""
    found = launch_line_of(path, given, now)
    return group_flags(found.arguments, found.line)


@dataclass(frozen=True)
class _Script:
    interpreter: Interpreter
    directives: list[JobWord]
    run: Run
    launch: LaunchLine


def _read(text: str, path: Path, given: Mapping[str, str], now: datetime, around: Surroundings) -> _Script:
    directives = read_directives(text)
    size = size_of(directives)

    def outside(name: str, line: int) -> Value | None:
        found = outside_value(name, line, size, path.name)
        return found if found is not None else around.value_of(name, line)

    commands, beside = read_commands(text), FilesBeside(path, given.values())

    def read_with(arguments: int) -> _Script:
        world = World(dict(given), outside, size.gpus, now, beside.text_of, arguments)
        interpreter = Interpreter(world)
        if (folder := folder_of(directives)) is not None:
            interpreter.state.variables["PWD"] = plain(*folder)
        try:
            interpreter.run(commands)
            return _Script(interpreter, directives, *_training_line(interpreter, text, given))
        finally:
            check_given(given, [text, *beside.texts], interpreter.used)

    try:
        return read_with(0)
    except _EndsEarly:
        # As `if [ $# -ne 6 ]; then exit 1`: the number of arguments with which the script goes on.
        for arguments in range(1, _MOST_ARGUMENTS + 1):
            with suppress(_EndsEarly):
                return read_with(arguments)
        raise


def _import(
    text: str, path: Path, given: Mapping[str, str], now: datetime, environment: Mapping[str, str]
) -> ImportedScript:
    around = Surroundings(environment)
    script = _read(text, path, given, now, around)
    launch, state = script.launch, script.interpreter.state
    architecture = architecture_of(launch.entry, launch.line)

    def file_text(name: str) -> str | None:
        written = state.files.get(name) or state.files.get(name.removeprefix("./."))
        if written is not None:
            return text_of(written) if missing_of(written) is None else None
        place = path.parent / name
        return place.read_text(encoding="utf-8", errors="replace") if place.is_file() else None

    folder = around.folder(launch.folder)
    words = bind(around.words(launch.arguments), folder)
    groups = name_open_values(group_flags(words, launch.line), given, state.variables)
    groups, asking_fp8 = divide_fp8(groups, given)
    ask([*launch.asked, *questions(groups), *base_width_asked(groups, given)], text)
    groups = open_split_files(with_base_width(groups, given), file_text)
    flags = read_flags(groups, file_text)
    put_bf16(asking_fp8, flags)
    tell_rules_of_mup(flags, groups)
    put_program(architecture, launch.entry.rpartition("/")[2], launch.line, flags)
    put_folder(folder, flags)
    put_start(flags)
    drop_idle(architecture, flags)
    job = job_meaning(script.directives, launch, script.run.environment)
    return _written(path, launch, flags, job, script.interpreter, around)


def _training_line(interpreter: Interpreter, text: str, given: Mapping[str, str]) -> tuple[Run, LaunchLine]:
    """The only command of the script that trains, or the one that the user chose."""
    shells = Started(interpreter)
    found: list[tuple[Run, LaunchLine]] = []
    other: LaunchLine | None = None
    for run in list(interpreter.state.runs):
        launch = read_launch_line(run, shells)
        if launch is not None and launch.trains:
            found.append((run, launch))
        elif launch is not None:
            other = launch
    if len(found) > 1:
        found = [_chosen(found, given)]
    elif TRAINING_LINE in given:
        raise ScriptError(0, f"--arg {TRAINING_LINE}: the script has one training line or none; leave it out")
    if not found and other is not None:
        architecture_of(other.entry, other.line)
    if not found and interpreter.state.exits:
        words = last_words_of(text, interpreter.state.exits[0])
        shown = f" ({words})" if words else ""
        message = f"the script ends here before it trains; give what it asks for with --arg NAME=VALUE{shown}"
        raise _EndsEarly(interpreter.state.exits[0], message)
    if not found and shells.unread:
        raise shells.unread[0]
    if not found:
        raise ScriptError(0, "starts no training program; a line such as torchrun pretrain_gpt.py is needed")
    return found[0]


def _chosen(found: Sequence[tuple[Run, LaunchLine]], given: Mapping[str, str]) -> tuple[Run, LaunchLine]:
    """One of several training lines."""
    lines = list(dict.fromkeys(launch.line for _, launch in found))
    wanted = given.get(TRAINING_LINE)
    chosen = [one for one in found if wanted in (None, str(one[1].line))]
    if len(chosen) == 1:
        return chosen[0]
    if wanted is not None and not chosen:
        known = " or ".join(map(str, lines))
        raise ScriptError(0, f"--arg {TRAINING_LINE}: no training program starts in line {wanted}; use {known}")
    line, loops = chosen[0][1].line, chosen[0][0].loops
    if len({launch.line for _, launch in chosen}) == 1:
        raise _one_round(line, [loop for loop in loops if loop[0] not in given])
    others = ", ".join(f"line {number}" for number in lines if number != line)
    choice = f"--arg {TRAINING_LINE}={line} trains this script's first"
    problem = f"a training program starts here and in {others}; a config has one: {choice}"
    raise ScriptError.asking(line, problem, TRAINING_LINE, [str(line)])


def _one_round(line: int, loops: Sequence[tuple[str, str]]) -> ScriptError:
    """The question for one round of the loops around a training line, each with its first value."""
    if not loops:
        several = "a training program starts here, several times; a config has one: leave one in the script"
        return ScriptError(line, several)
    where, (name, first) = f"in a loop over {' and '.join(name for name, _ in loops)}", loops[-1]
    such_as = f", such as {first}" if first else ""
    problem = f"a training program starts here, {where}; a config has one: give one round with --arg {name}=VALUE"
    return ScriptError.asking(line, f"{problem}{such_as}", name, [first])


def _written(
    path: Path,
    launch: LaunchLine,
    flags: FlagMeaning,
    job: JobMeaning,
    interpreter: Interpreter,
    around: Surroundings,
) -> ImportedScript:
    skipped = interpreter.state.skipped
    sections: dict[str, dict[str, Any]] = {"job": dict(job.values)} if job.values else {}
    for key, value in flags.values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    origins = {**flags.origins, **{f"job.{key}": origin for key, origin in job.origins.items()}}
    try:
        config = build_config(sections)
    except ConfigError as error:
        raise all_problems(
            _unread(error, interpreter) or [_blamed(each, origins, launch.line) for each in error.all]
        ) from None
    prepared = [(line, words, "the cluster's profile sets the environment up") for line, words in skipped]
    programs = " ".join([*launch.programs, launch.entry.rpartition("/")[2]])
    text = render_config(
        f"From {path.name} by llmctl import-script: {programs}, line {launch.line}.",
        sections,
        origins,
        config,
        [
            ("Differs from Megatron-LM:", sorted(flags.remarks)),
            ("Differs from the script's job:", sorted(job.remarks)),
            ("Taken from the environment:", sorted(around.told())),
            ("Flags without effect here:", sorted(flags.without_effect)),
            (
                "Words of scheduler, launcher and environment that llmctl replaces:",
                sorted([*job.without_effect, *prepared]),
            ),
        ],
    )
    ignored = len(flags.without_effect) + len(job.without_effect) + len(prepared)
    checked = config.model_dump(mode="json")
    plain_sections = {name: {key: checked[name][key] for key in values} for name, values in sections.items()}
    remarks = tuple(
        f"{f'line {line}: ' if line else ''}{words}: {reason}"
        for line, words, reason in sorted([*flags.remarks, *job.remarks, *around.told()])
    )
    return ImportedScript(plain_sections, text, ignored, remarks)


def _unread(error: ConfigError, interpreter: Interpreter) -> list[tuple[int, str]]:
    """The files without which whole sections are missing, if the script reads any that are not here."""
    absent = [each.key for each in error.all if "is required" in each.problem and "." not in each.key]
    if not absent:
        return []
    what = f"the flags of {' and '.join(absent)} are missing, which this file may have"
    found = []
    for line, name in unread_files(interpreter.state.skipped):
        shown, missing = interpreter.open_files.get(line, (name, []))
        found += [(line, f"reads {shown}: {one.problem}, for the place of this file") for one in missing]
        if not missing:
            found.append((line, f"reads {name}, which is not beside the script: {what}; put it there"))
    return found


def _blamed(error: ConfigError, origins: Mapping[str, str], launch_line: int) -> tuple[int, str]:
    """Line and message of a problem: those of the flag that set the key, or that is missing on the launch line."""
    origin = origins.get(error.key, "")
    _, dot, name = error.key.partition(".")
    flag = origin.partition(",")[0]
    if not origin and dot and "is required" in error.problem:
        flag = f"--{name.replace('_', '-')}"
    words = f"{flag} ({error.key})" if flag else error.key
    return line_of(origin) or launch_line, f"{words}: {error.problem}" if words else error.problem
