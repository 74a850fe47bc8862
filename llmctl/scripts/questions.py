"""Values that a user must give for a script, and those that the user gave."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from llmctl.scripts.choices import BASE_WIDTH, GIVEN
from llmctl.scripts.errors import ScriptError, all_problems
from llmctl.scripts.flag_group import is_open_flag

_USAGE = re.compile(r"(usage:[^\n\"'\\]{3,120})", re.IGNORECASE)
_ECHO = re.compile(r"""\becho\s+(?:-\w+\s+)*(?:"([^"\n]{3,120})"|'([^'\n]{3,120})')""")
_NAME = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)|\b([A-Za-z_]\w*)\+?=")
_ARGUMENTS = re.compile(r"\$\{?[#!]?[1-9@*#]|\bshift\b|\bgetopts\b|\bBASH_ARGV\b")
_SHOWN, _TRIED = 8, 8
TRAINING_LINE = "training_line"
"""Name of the choice between several training lines, by --arg; no script has such a variable."""


def usage_of(text: str) -> str:
    """The script's own line on its usage; empty without one."""
    usage = _USAGE.search(text)
    return " ".join(usage[1].split()) if usage is not None else ""


def last_words_of(text: str, line: int) -> str:
    """The script's usage, or what it prints just before it ends in ``line``; empty if neither is there."""
    found = _ECHO.findall("\n".join(text.splitlines()[max(line - 3, 0) : line]))
    return usage_of(text) or (" ".join("".join(found[-1]).split()) if found else "")


def ask(questions: Iterable[tuple[int, str]], text: str) -> None:
    """Raise an error with all questions, one a line.

    Args:
        questions: line of the script and sentence of each.
        text: of the script, whose own usage is told where an argument is asked for.

    Raises:
        ScriptError: there is a question.
    """
    found = list(questions)
    if not found:
        return
    error = all_problems(found)
    usage = usage_of(text) if "the script's argument" in error.problem else ""
    raise ScriptError(
        error.line, f"{error.problem}{f'{chr(10)}the script says: {usage}' if usage else ''}", asked=found
    )


def with_further(
    error: ScriptError, text: str, again: Callable[[Mapping[str, str]], ScriptError | None]
) -> ScriptError:
    """A question together with those that would follow, as far as they follow whatever its answer.

    For one of several training lines or rounds, which are known by their numbers alone, they are those of the first.

    Args:
        error: with a choice; any other is returned.
        text: of the script.
        again: the error with answers to the choices; None if the script is read then.
    """
    if error.choice is None:
        return error
    asked, assumed, others = list[tuple[int, str]](), dict[str, str](), list[tuple[str, str]]()
    following: ScriptError | None = error
    while following is not None and following.choice is not None and following.choice.name not in assumed:
        asked += following.asked
        name, (first, *rest) = following.choice.name, following.choice.values
        assumed[name] = first
        others += [(name, value) for value in rest[:_TRIED]]
        following = again(assumed)
    further = list(following.asked) if following is not None else []
    for name, value in others if further else ():
        other = again({**assumed, name: value})
        if other is None or other.asked:
            further = [one for one in further if other is not None and one in other.asked]
    try:
        ask([*asked, *further], text)
    except ScriptError as told:
        return told
    return error


def check_given(given: Mapping[str, str], texts: Sequence[str], used: Collection[str]) -> None:
    """Check that the script asks for each value that the user gave, or sets it.

    Args:
        given: by --arg.
        texts: the script and the files that it reads.
        used: names that the walk through the script met.

    Raises:
        ScriptError: a name that stands nowhere in them; with the nearest name.
    """
    for name in given:
        if name == TRAINING_LINE or name in used or any(_mentions(text, name) for text in texts):
            continue
        if any(is_open_flag(text, name) for text in texts):
            continue
        if name.isdigit():
            raise ScriptError(0, f"--arg {name}: the script uses no arguments, not ${name} or $@; leave it out")
        names = sorted({found for text in texts for pair in _NAME.findall(text) for found in pair if found})
        is_flag = any(re.search(rf"(?<!\S)--{re.escape(name)}[\s=]", text) for text in texts)
        if is_flag and name.upper().replace("-", "_") not in names:
            there = f"the script has a value for --{name}; change it there, or give its key to submit with --set"
            raise ScriptError(0, f"--arg {name}: {there}")
        near = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name.upper(), names, n=1)
        known = f"; it has {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}" if names else ""
        remedy = f"; did you mean {near[0]}?" if near else f"{known}: leave it out"
        raise ScriptError(0, f"--arg {name}: the script neither uses nor sets {name}{remedy}")


def _mentions(text: str, name: str) -> bool:
    if name.isdigit():
        return _ARGUMENTS.search(text) is not None
    if name == BASE_WIDTH:
        return re.search(r"(?<![\w-])--mup(?![\w-])", text) is not None
    # fp8 is a choice that the flags of a script ask for; any other name is a variable, not a part of a flag.
    before = r"(?<!\w)" if name == GIVEN else r"(?<!\w)(?<!\s-)(?<!--)"
    return re.search(rf"{before}{name}(?!\w)", text) is not None
