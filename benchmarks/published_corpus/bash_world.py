"""Surroundings in which bash runs a script as llmctl reads it: variables, arguments, and files of other machines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from benchmarks.published_corpus.sandbox import JOB, STUBS, Recorded, Start, folder_in_sandbox, record
from benchmarks.published_corpus.texts import KNOWN, SUFFIXES
from llmctl.scripts.directives import read_directives
from llmctl.scripts.job_meaning import size_of
from llmctl.scripts.outside import JobSize, outside_value
from llmctl.scripts.shell.values import Value, missing_of, text_of

_ROUNDS = 6
_IN_JOB = "7"
"""Value of a variable that only the job knows: a number, so that scripts can calculate."""
_NAME = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")
_OF_THE_SANDBOX = frozenset(
    (
        *("PATH", "HOME", "USER", "PWD", "OLDPWD", "SHELL", "LANG", "EDITOR", "RANDOM", "SECONDS", "EPOCHSECONDS"),
        *("UID", "PPID", "TMPDIR", "LD_PRELOAD", "LD_LIBRARY_PATH", "BASH_SOURCE", "_"),
    )
)
_NODE_FILES = (
    "PE_HOSTFILE",
    "SGE_JOB_HOSTLIST",
    "PBS_NODEFILE",
    "PJM_O_NODEINF",
    "LSB_DJOB_HOSTFILE",
    "COBALT_NODEFILE",
)
_NODES = "nodes_of_the_job"
# A place that the script leaves open is no command of bash: `A=<folder>`.
_PLACE = re.compile(r"^(\s*(?:export +)?\w+=)<[A-Za-z][^<>\n]*>[^\s;]*", re.MULTILINE)
_NO_FOLDER = re.compile(r": (?:line \d+: )?(?:cd|pushd): (.+): No such file or directory$", re.MULTILINE)
_NO_FILE = re.compile(r"line \d+: (?!cd: |pushd: )(.+): No such file or directory$", re.MULTILINE)
_NO_INPUT = re.compile(
    r"^(?:mv|cp|cat|sed|ls): (?:cannot \w+ |can't read )?'?([^']+)'?: No such file or directory$", re.M
)
_NO_COMMAND = re.compile(r"line \d+: ([\w.+-]+): command not found$", re.MULTILINE)
_NO_VARIABLE = re.compile(r": ([A-Za-z_]\w*): unbound variable$", re.MULTILINE)
_PROGRAM = re.compile("|".join([*map(re.escape, STUBS), r"python\d[\d.]*"]))
_EMPTY = re.compile(r"-z +\"?\$\{?([A-Za-z_]\w*)")
_TRAINS = re.compile(r"(?:.*/)?(?:pretrain\w*|train\w*|finetune\w*|main|run_\w+)\.py")


def starts_of(path: Path, repository: Path, given: Mapping[str, str], now: datetime) -> Iterator[Start]:
    """Starts of a script, the most likely first: in its own folder, and in those above as far as the repository.

    Args:
        path: of the script.
        repository: folder above.
        given: answers of the user, which no line of the script changes: its assignments are renamed.
        now: the time that ``date`` prints.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    script = path.relative_to(repository)
    count = max((int(name) for name in given if name.isdigit()), default=0)
    arguments = [given.get(str(place), "") for place in range(1, count + 1)]
    named = {name: value for name, value in given.items() if not name.isdigit()}
    changed = _without_assignments(repository, list(named))
    # The nodes of the job, and the programs of Megatron-LM beside which a script may be run.
    changed |= {_NODES: "node1 8\n", **{f"{name}.py": "" for name in KNOWN}}
    for folder in script.parents:
        size = size_of(read_directives(text))
        environment = {**_outside(text, size, path.name, folder_in_sandbox(str(folder))), **named}
        yield Start(repository, str(script), str(folder), now, arguments, environment, changed, gpus=size.gpus or 0)


def with_open_values(path: Path, given: Mapping[str, str], words: Iterable[Value]) -> dict[str, str]:
    """The answers, with a value for each variable that nobody need give, but without which the script ends.

    Args:
        path: of the script.
        given: answers of the user.
        words: of the training line; for llmctl those variables are parts that only the job knows.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    names = set(_EMPTY.findall(text)) | {missing.name for missing in map(missing_of, words) if missing is not None}
    return {**{name: _IN_JOB for name in sorted(names) if name.isidentifier()}, **given}


def trained(start: Start) -> tuple[Recorded, Start]:
    """Run a script, and again with each folder, file or program that bash does not find."""
    result = record(start)
    for _ in range(_ROUNDS):
        completed = _completed(start, result.errors)
        if completed == start:
            break
        start = completed
        result = record(start)
    return result, start


def training_words(result: Recorded) -> list[tuple[str, ...]]:
    """The distinct commands that train, as folder, file of the program and its arguments."""
    found = []
    for folder, _program, *words in result.commands:
        place = next((place for place, word in enumerate(words) if _TRAINS.fullmatch(word)), None)
        if place is not None:
            found.append((folder, *words[place:]))
    return list(dict.fromkeys(found))


def _outside(text: str, size: JobSize, name_of_script: str, here: str) -> dict[str, str]:
    """Variables of schedulers that the script mentions, with llmctl's values; ``here`` is the folder of the start."""
    found = {}
    for name in set(_NAME.findall(text)) - _OF_THE_SANDBOX:
        value = outside_value(name, 0, size, name_of_script)
        if value is None:
            continue
        missing = missing_of(value)
        if any(chunk.is_here for chunk in value):
            found[name] = here
        elif missing is None:
            found[name] = text_of(value)
        elif name in _NODE_FILES:
            found[name] = f"{JOB}/{_NODES}"
        else:
            found[name] = missing.stand_in if missing.stand_in is not None else _IN_JOB
    return found


def _without_assignments(repository: Path, names: list[str]) -> dict[str, str]:
    """The scripts that bash must read in another way, by path: assignments to the variables get another name."""
    # `A=1` and `A+=1`, but not `A=${A:-1}`, which llmctl reads as well, nor `--A=1`.
    one = "|".join(map(re.escape, names)) or r"\b\B"
    pattern = re.compile(rf"(?<![\w$/{{.!-])({one})(?=(?:\[[^]\n]*\])?\+?=(?!=)(?!\"?[^\s;]*\$\{{?\1\b))")
    found = {}
    for path in sorted(one for one in repository.rglob("*") if one.name.endswith(SUFFIXES)):
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        after = _PLACE.sub(r"\1", text)
        after = pattern.sub(r"\1__in_the_script", after)
        if after != text:
            found[str(path.relative_to(repository))] = after
    return found


def _completed(start: Start, errors: str) -> Start:
    folders, files, programs, links = set(start.folders), set(start.files), set(start.programs), dict(start.links)
    folders.update(_NO_FOLDER.findall(errors))
    programs.update(_NO_COMMAND.findall(errors))
    for path in (*_NO_FILE.findall(errors), *_NO_INPUT.findall(errors)):
        own = f"/{Path(start.script).parent.name}/"
        inside = Path(start.script).parent / path.rpartition(own)[2]
        if path.startswith("/") and own in path and (start.repository / inside).is_file():
            links[path] = str(inside)  # The repository has another place where the script was written.
            continue
        (programs if _PROGRAM.fullmatch(path.rpartition("/")[2]) else files).add(path)
    files -= {one for one in files if one.endswith("/")} | folders
    # llmctl reads a variable that nothing sets as an empty one.
    unset = {name: "" for name in _NO_VARIABLE.findall(errors) if name not in start.environment}
    return replace(
        start,
        folders=frozenset(folders),
        files=frozenset(files),
        programs=frozenset(programs),
        links=links,
        environment={**unset, **start.environment},
    )
