"""Flags of a training line as values of the training config, each with the flag and line that it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llmctl.scripts.deepspeed import read_deepspeed
from llmctl.scripts.errors import ScriptError, all_problems
from llmctl.scripts.flag_group import UNKNOWN_TEXT, FlagGroup
from llmctl.scripts.shell.values import Missing
from llmctl.scripts.unknown_places import LABELS, left_out
from trainer.config.counted_flags import COUNTED, OF_SAMPLES
from trainer.config.forks.ignored import DENSE
from trainer.config.joint.flags import JOINT_FLAGS
from trainer.config.joint.weighted_splits import WEIGHTED_FILES, groups_of_file
from trainer.config.megatron_flags import SQUARE_ROOTS
from trainer.config.sections.profile_steps import FLAGS, NO_PROFILE, STEPS
from trainer.planning.command_line import CommandLine, UsageError, parse_command_line

ENTRY_POINTS = {"pretrain_gpt": "decoder", "pretrain_bert": "bert", "pretrain_t5": "t5"}
"""Program of Megatron-LM, without its ending -> architecture."""
_DEEPSPEED_CONFIG = ("deepspeed_config", "deepspeed-config")


@dataclass
class FlagMeaning:
    """All flags of a training line.

    Attributes:
        values: dotted key -> value.
        origins: dotted key -> flag and line.
        without_effect: line, flag and reason.
        remarks: line, flag and sentence, where the meaning differs from Megatron-LM's.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    without_effect: list[tuple[int, str, str]] = field(default_factory=list)
    remarks: list[tuple[int, str, str]] = field(default_factory=list)


def line_of(origin: str) -> int:
    """The line of the script in an origin such as ``--lr, line 3``; 0 without one."""
    found = re.search(r"\bline (\d+)", origin)
    return int(found[1]) if found is not None else 0


def architecture_of(entry: str, line: int) -> str:
    """The architecture that a training program trains.

    Raises:
        ScriptError: the program is not one of Megatron-LM's three.
    """
    name = entry.rpartition("/")[2].removesuffix(".py").rpartition(".")[2]
    if name in ENTRY_POINTS:
        return ENTRY_POINTS[name]
    if entry.endswith("tasks/main.py"):
        raise ScriptError(
            line, "tasks/main.py fine-tunes on a task, which is not supported; pretrain_bert.py can be read"
        )
    known = ", ".join(f"{one}.py" for one in ENTRY_POINTS)
    raise ScriptError(line, f"{entry} is not a known training program; known are {known}")


def status_of(group: FlagGroup) -> Literal["meant", "no effect", "refused"]:
    """The meaning of a single flag of a script."""
    if group.name in _DEEPSPEED_CONFIG or _joint_keys(group):
        return "meant"
    try:
        return "meant" if parse_command_line(group.words).values else "no effect"
    except UsageError:
        return "refused"


def questions(groups: Sequence[FlagGroup]) -> list[tuple[int, str]]:
    """Line and sentence for each flag whose value only the user can give."""
    found: dict[str, tuple[int, str]] = {}
    known = left_out(groups)
    for place, group in enumerate(groups):
        try:
            if group.name not in _DEEPSPEED_CONFIG and place not in known:
                _alone(group, FlagMeaning())
        except ScriptError as error:
            if group.missing is not None:
                # A file that is read is told for each flag, beside the question for its folder.
                key = group.name if _flag(group) in WEIGHTED_FILES else group.missing.name or group.missing.what
                found.setdefault(key, (error.line, _without_flag(group, group.missing) or error.problem))
                for other in group.further:
                    found.setdefault(other.name or other.what, (other.line, f"--{group.name}: {other.problem}"))
    return list(found.values())


def _without_flag(group: FlagGroup, missing: Missing) -> str:
    """The question for a word that stands behind a flag without belonging to it; empty for a value of the flag."""
    if not missing.name or group.words[1:] != (UNKNOWN_TEXT,):
        return ""
    try:
        parse_command_line(group.words[:1])
    except UsageError:
        return ""
    return missing.problem_of_word


def open_split_files(groups: Sequence[FlagGroup], file_text: Callable[[str], str | None]) -> list[FlagGroup]:
    """The flags of a script, with the groups of a blend instead of the file that has them.

    Args:
        groups: the flags.
        file_text: text of a file that a flag names; None if the file is not here.

    Raises:
        ScriptError: a file is not here.
    """
    found, problems = list[FlagGroup](), list[tuple[int, str]]()
    for group in groups:
        try:
            found.append(_with_groups(group, file_text))
        except ScriptError as error:
            problems.append((error.line, error.problem))
    if problems:
        raise all_problems(problems)
    return found


def _with_groups(group: FlagGroup, file_text: Callable[[str], str | None]) -> FlagGroup:
    flag = WEIGHTED_FILES.get(_flag(group))
    if flag is None:
        return group
    name = group.words[0].partition("=")[2] or " ".join(group.words[1:])
    text = file_text(name)
    if text is None:
        place = "on this machine" if name.startswith("/") else "beside the script"
        remedy = f"put it there, give another place with --arg, or use --{flag}"
        raise ScriptError(group.line, f"--{group.name}: reads {name}, which is not {place}; {remedy}")
    return replace(group, name=flag, words=(f"--{flag}", *groups_of_file(text)))


def read_flags(groups: Sequence[FlagGroup], file_text: Callable[[str], str | None]) -> FlagMeaning:
    """The meaning of all flags.

    Args:
        groups: the flags.
        file_text: text of a file that a flag names, if the script or this machine has the file.

    Raises:
        ScriptError: a flag is unknown or refused, or has a value that only the job knows.
    """
    found = FlagMeaning()
    meant = []
    known = left_out(groups)
    for place, group in enumerate(groups):
        if place in known:
            told = found.remarks if known[place].is_told else found.without_effect
            told.append((group.line, known[place].shown, known[place].reason))
        elif group.name not in _DEEPSPEED_CONFIG:
            meant.append(group)
    alone = {place: _alone(group, found) for place, group in enumerate(meant)}
    line = _together(meant)
    found.values = dict(line.values)
    _put_origins(meant, alone, found)
    _note_what_yields(meant, alone, found)
    _note_what_others_set(meant, alone, found)
    _note_joint(meant, line.notes, found)
    if STEPS not in found.values:
        asked = [group for group in meant if _flag(group) in FLAGS]
        found.without_effect += [(group.line, " ".join(group.words), NO_PROFILE) for group in asked]
    for group in groups:
        if group.name in _DEEPSPEED_CONFIG:
            _read_deepspeed(group, found, file_text)
    return found


def _put_origins(meant: Sequence[FlagGroup], alone: Mapping[int, Mapping[str, Any]], found: FlagMeaning) -> None:
    """The flag and line that each value came from."""
    for key, value in found.values.items():
        setters = [place for place, values in alone.items() if key in values or key in _joint_keys(meant[place])]
        same = [place for place in setters if alone[place].get(key) == value]
        if setters:
            last = meant[(same or setters)[-1]]
            together = [meant[place] for place in setters if _flag(meant[place]) in JOINT_FLAGS]
            found.origins[key] = ", ".join(one.origin for one in (together if last in together else [last]))
        elif key == OF_SAMPLES:
            found.origins[key] = next(one.origin for one in meant if one.name.replace("_", "-") == "train-samples")


def _note_what_yields(meant: Sequence[FlagGroup], alone: Mapping[int, Mapping[str, Any]], found: FlagMeaning) -> None:
    """Tell what sets a key by itself and none beside the other flags: the single expert of Megatron-DeepSpeed."""
    for place, values in alone.items():
        if values and not values.keys() & found.values.keys():
            found.without_effect.append((meant[place].line, " ".join(meant[place].words), DENSE))


def _note_what_others_set(
    meant: Sequence[FlagGroup], alone: Mapping[int, Mapping[str, Any]], found: FlagMeaning
) -> None:
    """Tell each flag whose keys all come from other flags, so that no flag is passed over in silence."""
    for place, group in enumerate(meant):
        if _flag(group) in JOINT_FLAGS:
            continue
        keys = [key for key in (*alone[place], *_joint_keys(group)) if key in found.origins]
        if keys and not any(found.origins[key] == group.origin for key in keys):
            reason = f"{keys[0]} comes from {found.origins[keys[0]]}"
            found.without_effect.append((group.line, " ".join(group.words), reason))


def _note_joint(meant: Sequence[FlagGroup], notes: Sequence[str], found: FlagMeaning) -> None:
    """Tell the flags without effect beside the others, whose meaning alone says nothing."""
    for group in meant:
        note = next((note for note in notes if note.startswith(f"--{_flag(group)} ")), None)
        if note is not None and _flag(group) in JOINT_FLAGS:
            found.without_effect.append((group.line, " ".join(group.words), note.partition(": ")[2]))


def _alone(group: FlagGroup, found: FlagMeaning) -> dict[str, Any]:
    """Keys that one flag sets by itself; a flag that is wrong only by itself sets none."""
    if group.missing is not None and (_joint_keys(group) or _flag(group) in WEIGHTED_FILES):
        also = ", and put the file there, which is read" if _flag(group) in WEIGHTED_FILES else ""
        raise ScriptError(group.missing.line, f"--{group.name}: {group.missing.problem}{also}")
    try:
        parsed = parse_command_line(group.words)
    except UsageError as error:
        if group.missing is not None and ": takes " in str(error):  # $ARGS without a value, beside a flag's own values
            raise ScriptError(group.missing.line, f"--{group.name}: {group.missing.problem}") from None
        return {}
    if parsed.values and group.missing is not None and not group.name.startswith(LABELS):
        raise ScriptError(group.missing.line, f"--{group.name}: {group.missing.problem}")
    for note in parsed.notes if _flag(group) not in (*FLAGS, *JOINT_FLAGS) else ():
        found.without_effect.append((group.line, " ".join(group.words), note.partition(": ")[2]))
    return dict(parsed.values)


def _joint_keys(group: FlagGroup) -> tuple[str, ...]:
    """Keys that a flag sets only beside others: a length in samples or tokens, the root of a size, a profile, yarn."""
    name = _flag(group)
    if name in JOINT_FLAGS:
        return JOINT_FLAGS[name]
    if name in FLAGS:
        return (STEPS,)
    key = SQUARE_ROOTS[name][0] if name in SQUARE_ROOTS else COUNTED.get(name)
    return () if key is None else (key,)


def _flag(group: FlagGroup) -> str:
    return group.name.replace("_", "-")


def _together(groups: Sequence[FlagGroup]) -> CommandLine:
    """The meaning of all flags; an error tells every flag that is refused."""
    left, problems = list(groups), list[tuple[int, str]]()
    while True:
        try:
            parsed = parse_command_line([word for group in left for word in group.words])
        except UsageError as error:
            refused = next((group for group in left if _refusal(group) == str(error)), None)
            # A flag that is refused only beside others is named first.
            named = [group for group in left if str(error).startswith(f"--{_flag(group)}: ")]
            problems.append(((refused or [groups[0], *named][-1]).line, str(error)))
            if refused is not None:
                left.remove(refused)
                continue
        if problems:
            raise all_problems(problems)
        return parsed


def _refusal(group: FlagGroup) -> str:
    try:
        parse_command_line(group.words)
    except UsageError as error:
        return str(error)
    return ""


def _read_deepspeed(group: FlagGroup, found: FlagMeaning, file_text: Callable[[str], str | None]) -> None:
    name = group.words[0].partition("=")[2] or " ".join(group.words[1:2])
    if not name:
        raise ScriptError(group.line, f"--{group.name}: takes the name of a JSON file")
    text = None if group.missing is not None else file_text(name)
    if text is None:
        reason = "the JSON is neither in the script nor on this machine; the flags beside it are read alone"
        found.without_effect.append((group.line, f"--{group.name} {name}", reason))
        return
    told = len(found.remarks)
    for path, key, value in read_deepspeed(text, group.line, name):
        if key in found.values:
            _tell_contradiction(group, path, key, value, found)
        elif value is not None:
            found.values[key] = value
            found.origins[key] = f"{path} of --{group.name}, line {group.line}"
    if len(found.remarks) == told and not any(f"of --{group.name}, " in origin for origin in found.origins.values()):
        found.without_effect.append((group.line, f"--{group.name} {name}", "the flags beside the JSON say the same"))


def _tell_contradiction(group: FlagGroup, path: str, key: str, value: Any, found: FlagMeaning) -> None:
    """DeepSpeed's engine takes its JSON where a flag of Megatron-LM says something else."""
    taken = found.values[key]
    if _plain(taken) == _plain(value) or key == "logging.log_interval":
        return
    shown = "0 (a scale that adapts)" if value is None else str(value).lower() if isinstance(value, bool) else value
    flag = found.origins.get(key, key).partition(",")[0]
    reason = (
        f"{path} says {shown}, which DeepSpeed's engine takes; this run takes {taken}, of {flag}: leave one of them"
    )
    found.remarks.append((group.line, f"--{group.name}", reason))


def _plain(value: Any) -> Any:
    """A value that compares equal however a flag or a JSON writes it."""
    try:
        return float(value) if not isinstance(value, bool) else str(value).lower()
    except (TypeError, ValueError):
        return str(value).lower()
