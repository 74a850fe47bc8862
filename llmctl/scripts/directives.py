"""Directives of a batch script (#$, #SBATCH, #PBS, #BSUB) as keys of the job section.

Manual pages: qsub(1) of Grid Engine, sbatch(1), qsub(1B), bsub(1).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmctl.scripts.errors import ScriptError
from llmctl.site.job import NAME, NODE, WORD, parse_nodes
from llmctl.site.notify import events_of_mail, place_problem

_DIRECTIVE = re.compile(r"#(\$|SBATCH|PBS|BSUB)[ \t]+(-.*)")
_OUTPUT = "output goes to the run directory; see llmctl logs"
_PROFILE = "the cluster's profile decides this"
_MAIL = "these words for mail have no counterpart; give --notify mailto:ADDRESS and --notify-on EVENTS"
_LAYOUT = "runs begin in their run directory"
JOB_FOLDER = "folder"
"""Key of the word that names the folder in which the job starts; no key of the config."""
_ARRAY = "an array of jobs becomes one job; submit the script once for each number, given with --arg"
_SGE_EXCLUDED = re.compile(r"!\(?([^()!&*?]+)\)?")
"""Names of hosts that a job shall not have, as in ``h=!(n1|n2)``; see complex(5), RESTRING."""
_SGE_LIMITS = frozenset(
    ("h_rt", "s_rt", "h_vmem", "s_vmem", "mem", "mem_free", "hostname", "h", "arch", "USE_SSH", "USE_BEEOND")
)


@dataclass(frozen=True)
class JobWord:
    """A key of the job section, or a word of the script without such a key.

    Attributes:
        line: of the script.
        text: as written.
        key: of the job section; empty without a counterpart.
        value: for the key.
        reason: sentence for a word without a counterpart.
        is_told: True if the loss changes what runs, which the user is told before the job is queued.
    """

    line: int
    text: str
    key: str = ""
    value: Any = None
    reason: str = ""
    is_told: bool = False


def read_directives(text: str) -> list[JobWord]:
    """All directives of a script, in their order.

    Raises:
        ScriptError: a number or time cannot be read.
    """
    found: list[JobWord] = []
    for number, line in enumerate(text.splitlines(), start=1):
        match = _DIRECTIVE.match(line)
        if match is None:
            continue
        try:
            words = shlex.split(match[2], comments=True)
        except ValueError:
            raise ScriptError(number, f"the directive {line.strip()!r} has a quote that never closes") from None
        reader = {"$": _sge, "SBATCH": _slurm, "PBS": _pbs, "BSUB": _lsf}[match[1]]
        for option, value in _options(words):
            shown = f"#{match[1]} {option}{f' {value}' if value else ''}"
            if _is_array(match[1], option, value):
                found.append(JobWord(number, shown, reason=_ARRAY, is_told=True))
                if option != "-J" or match[1] != "BSUB":
                    continue
            found += [_checked(number, shown, *one) for one in reader(option, value)]
    has_address = any(word.key == "notify" for word in found)
    return [_without_address(word) if word.key == "notify_on" and not has_address else word for word in found]


def _is_array(sign: str, option: str, value: str) -> bool:
    """True for the words that make one script many jobs."""
    if sign == "BSUB":
        return option == "-J" and value.endswith("]")
    if sign == "SBATCH":
        return option == "--array" or option[:2] == "-a"
    return option in {"$": ("-t",), "PBS": ("-J", "-t")}[sign]


def _without_address(word: JobWord) -> JobWord:
    return JobWord(word.line, word.text, reason="names no address; give --notify mailto:ADDRESS to be told")


_Found = tuple[str, Any, str]
"""Key, value, and the reason if there is no key."""


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(words):
        option, equals, value = words[place].partition("=") if words[place].startswith("--") else (words[place], "", "")
        place += 1
        if not equals and place < len(words) and (not words[place].startswith("-") or words[place][1:].isdigit()):
            value = words[place]
            place += 1
        yield option, value


def _sge(option: str, value: str) -> Iterator[_Found]:
    plain = {
        "-g": "group",
        "-P": "group",
        "-A": "group",
        "-N": "name",
        "-q": "queue",
        "-ar": "reservation",
        "-p": "priority",
    }
    if option == "-l":
        for part in value.split(","):
            name, _, amount = part.partition("=")
            if name == "h_rt":
                yield "time", _clock(amount, seconds=True), ""
            elif name in ("h", "hostname") and (excluded := _SGE_EXCLUDED.fullmatch(amount)) is not None:
                yield "exclude", excluded[1].split("|"), ""
            elif name in _SGE_LIMITS or not (amount or "1").isdigit():
                yield "", None, _PROFILE
            else:
                yield "resource_type", name, ""
                yield "nodes", int(amount or 1), ""
    elif option in ("-v",):
        yield from _variables(value)
    else:
        yield _plain(plain, option, value)


def _slurm(option: str, value: str) -> Iterator[_Found]:
    short = {
        "-N": "--nodes",
        "-t": "--time",
        "-p": "--partition",
        "-A": "--account",
        "-J": "--job-name",
        "-G": "--gpus",
        "-x": "--exclude",
    }
    name = short.get(option[:2], option) if not option.startswith("--") else option
    value = value or (option[2:] if not option.startswith("--") else "")
    plain = {"--partition": "queue", "--account": "group", "--job-name": "name", "--reservation": "reservation"}
    gpus = re.fullmatch(r"(?:gpu:)?(?:[A-Za-z][\w.]*:)?(\d+)", value)
    if name == "--nodes":
        yield "nodes", _count(value.partition("-")[0]), ""
    elif name == "--time":
        yield "time", _slurm_clock(value), ""
    elif name in ("--gpus-per-node", "--gres") and gpus is not None:
        yield "gpus_per_node", int(gpus[1]), ""
    elif name == "--exclude":
        yield "exclude", parse_nodes(value), ""
    elif name == "--container-image":
        yield "container", value, ""
    elif name == "--container-mounts":
        yield "mounts", value.split(","), ""
    elif name == "--ntasks-per-node":
        yield "ranks", _count(value), "the launch line decides about ranks"
    else:
        yield _plain(plain, name, value)


def _pbs(option: str, value: str) -> Iterator[_Found]:
    plain = {"-P": "group", "-A": "group", "-N": "name", "-p": "priority"}
    if option == "-l":
        for part in value.split(","):
            name, _, amount = part.partition("=")
            if name == "walltime":
                yield "time", _clock(amount, seconds=True), ""
            elif name in ("select", "nodes"):
                chunk = amount.split(":")
                yield "nodes", _count(chunk[0]), ""
                ranks = dict(one.split("=", 1) for one in chunk[1:] if "=" in one)
                for word in ("ngpus", "mpiprocs"):
                    if ranks.get(word, "").isdigit():
                        yield "gpus_per_node", int(ranks[word]), ""
                        break
            else:
                yield "", None, _PROFILE
    elif option == "-q":
        # ABCI's queues are its kinds of node.
        yield "resource_type" if value.startswith("rt_") else "queue", value, ""
    elif option == "-W" and value.startswith("group_list="):
        yield "group", value.partition("=")[2], ""
    elif option == "-v":
        yield from _variables(value)
    else:
        yield _plain(plain, option, value)


def _lsf(option: str, value: str) -> Iterator[_Found]:
    plain = {"-q": "queue", "-P": "group", "-G": "group", "-J": "name", "-U": "reservation", "-sp": "priority"}
    gpus = re.search(r"num=(\d+)", value)
    if option == "-nnodes":
        yield "nodes", _count(value), ""
    elif option == "-W":
        hours, _, minutes = value.rpartition(":")
        yield "time", f"{_count(hours or '0') + _count(minutes) // 60}:{_count(minutes) % 60:02}:00", ""
    elif option == "-gpu" and gpus is not None:
        yield "gpus_per_node", int(gpus[1]), ""
    else:
        yield _plain(plain, option, value)


def _plain(keys: dict[str, str], option: str, value: str) -> _Found:
    if option in keys:
        key = keys[option]
        return key, _count(value) if key == "priority" else value, ""
    if option in ("-o", "-e", "-j", "-oo", "-eo", "-k", "--output", "--error", "--open-mode"):
        return "", None, _OUTPUT
    if option in ("-M", "-u", "--mail-user"):
        places = [f"mailto:{address}" for address in value.split(",") if address]
        usable = bool(places) and not any(place_problem(place, ()) for place in places)
        return ("notify", places, "") if usable else ("", None, _MAIL)
    if option in ("-m", "--mail-type"):
        events = events_of_mail(value)
        return ("notify_on", events, "") if events is not None else ("", None, _MAIL)
    if option == "-B":
        return "notify_on", ["begin"], ""
    if option in ("-wd", "-d", "--chdir", "-D") and value not in ("", "."):
        return JOB_FOLDER, value, ""
    if option in ("-cwd", "-cd", "-wd", "-d", "--chdir", "-D"):
        return "", None, _LAYOUT
    return "", None, _PROFILE


def _variables(value: str) -> Iterator[_Found]:
    for pair in value.split(","):
        name, equals, text = pair.partition("=")
        if equals and name not in _SGE_LIMITS:
            yield "env", {name: text}, ""
        else:
            yield "", None, "a variable of the submitting shell is passed with --env or --secret"


def _checked(line: int, shown: str, key: str, value: Any, reason: str) -> JobWord:
    if key == "ranks":
        return JobWord(line, shown, "", None if value is _WRONG else value, reason)
    if key == "exclude":
        return excluded_nodes(line, shown, value)
    is_open = value is _WRONG and key in _SUBMITTED and not re.search(r"\d", shown.split()[-1])
    if is_open or (key == "nodes" and value == 0):
        return JobWord(line, shown, reason=f"stands for {_SUBMITTED[key]}", is_told=True)
    if (
        key == "name"
        and not NAME.fullmatch(str(value))
        or key in ("group", "queue", "resource_type")
        and not WORD.fullmatch(value)
    ):
        return JobWord(line, shown, reason="the word is known only inside the job, or has characters that no name has")
    if value is _WRONG:
        raise ScriptError(line, f"{shown}: the number or time cannot be read")
    return JobWord(line, shown, key, value, reason)


def excluded_nodes(line: int, shown: str, nodes: list[str]) -> JobWord:
    """Words that leave out nodes. A file of their names is not read, because only the cluster may have it."""
    if nodes and all(NODE.fullmatch(node) for node in nodes):
        return JobWord(line, shown, "exclude", nodes)
    return JobWord(line, shown, reason="names no nodes that can be read here; give them with --exclude")


_WRONG = object()
_SUBMITTED = {
    "nodes": "a number that is given at the submission; give --nodes",
    "time": "a limit that is given at the submission; give --time",
}


def _count(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else _WRONG


def _clock(text: str, *, seconds: bool) -> Any:
    """``H:M:S`` of a time of Grid Engine or PBS, where a single number counts seconds."""
    if text.isdigit() and seconds:
        return f"{int(text) // 3600}:{int(text) // 60 % 60:02}:{int(text) % 60:02}"
    days = re.fullmatch(r"(\d+):(\d+):(\d{1,2}:\d{1,2})", text)
    if days is not None:  # D:H:M:S, as Grid Engine reads it too
        return f"{int(days[1]) * 24 + int(days[2])}:{days[3]}"
    return text if re.fullmatch(r"\d*(:\d{1,2}){1,2}", text) else _WRONG


def _slurm_clock(text: str) -> Any:
    """A time of sbatch(1): minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = text.rpartition("-")
    if not re.fullmatch(r"\d+(:\d+){0,2}", rest) or (dash and not days.isdigit()):
        return _WRONG
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, secs = [*parts, 0, 0][:3]
        return f"{int(days) * 24 + hours}:{minutes:02}:{secs:02}"
    if len(parts) == 1:
        return f"{parts[0] // 60}:{parts[0] % 60:02}:00"
    return text


def folder_of(words: Sequence[JobWord]) -> tuple[str, int] | None:
    """The folder in which the job starts and its line; None if it is the one of the submission."""
    return next(((word.value, word.line) for word in reversed(words) if word.key == JOB_FOLDER), None)
