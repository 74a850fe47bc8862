"""Assignments: of values, of array items, and of the items of an associative or sparse array."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from llmctl.scripts.shell.expansion import Expansion
from llmctl.scripts.shell.state import State
from llmctl.scripts.shell.syntax import Assignment, Parameter, Word
from llmctl.scripts.shell.values import LEFT_OPEN, Chunk, Missing, Value, absent, missing_of, named_after, text_of

# Not `<eod>` and other tokens of a vocabulary.
OPEN_PLACE = re.compile(
    r"(<[A-Za-z](?=[^<>\n]*(?: |path|dir|file|your|name|data|model|account|project))[^<>\n]*[^\s<>]>)", re.IGNORECASE
)


def assign(
    assignment: Assignment,
    expansion: Expansion,
    given: Collection[str],
    number: Callable[[str, int], int | None],
) -> None:
    """Set a variable; one that the user gave keeps the user's value, unless the line makes a known one of that value.

    Args:
        assignment: to carry out.
        expansion: in the state to change.
        given: names of the user's variables.
        number: value of an index; None if unknown.
    """
    name, state = assignment.name, expansion.state
    parts = [part for word in (assignment.value, *(assignment.items or ())) for part in word]
    if name in given and not any(isinstance(part, Parameter) and part.name == name for part in parts):
        return
    if assignment.items is not None:
        _put_items(assignment, expansion, number)
        return
    before = state.variables.get(name)
    is_own = any(isinstance(part, Parameter) and (part.name, part.operator) == (name, "") for part in parts)
    if before is None and is_own and expansion.outside(name, assignment.line) is None:
        state.variables[name] = ()  # ARGS="${ARGS} --flag" begins with nothing
    value = _named(_opened(expansion.text(assignment.value), name), name)
    if name in given and missing_of(value) is not None:
        return
    if assignment.index is not None:
        _put_item(name, assignment.index, value, assignment, expansion, number)
    elif assignment.appends and isinstance(before, list):
        state.variables[name] = [(*(before[0] if before else ()), *value), *before[1:]]
    else:
        state.variables[name] = (*(before or ()), *value) if assignment.appends else value


def _opened(value: Value, name: str) -> Value:
    """A value with the parts unknown that the script leaves open in quotes, as in ``DATA="<path to the data>"``.

    Of several words, such as flags, the variable's name alone would not say which one is open.
    """
    if re.search(r"\s", OPEN_PLACE.sub("", text_of(value))):
        return value
    return tuple(part for chunk in value for part in (_parts(chunk, name) if chunk.missing is None else [chunk]))


def _named(value: Value, name: str) -> Value:
    """The value of an assignment; beside whole flags, an unknown part has not the variable's name, but the flag's."""
    return value if re.search(r"(^|\s)--\w", text_of(value)) else named_after(value, name)


def _parts(chunk: Chunk, name: str) -> list[Chunk]:
    texts = OPEN_PLACE.split(chunk.text)
    return [
        absent(Missing(chunk.line, text, LEFT_OPEN, name))[0] if place % 2 else replace(chunk, text=text)
        for place, text in enumerate(texts)
        if text or len(texts) == 1
    ]


def _put_items(assignment: Assignment, expansion: Expansion, number: Callable[[str, int], int | None]) -> None:
    """``NAME=(items)``; an item is a word, or ``[key]=value``."""
    name, state = assignment.name, expansion.state
    assert assignment.items is not None
    if not any(place is not None for place in assignment.places) and name not in state.keys:
        items = expansion.words(assignment.items)
        has_flags = any(text_of(word).startswith("--") for word in items)
        items = items if has_flags else [named_after(word, name) for word in items]
        there = state.variables.get(name, [])
        there = there if isinstance(there, list) else [there]
        state.variables[name] = [*there, *items] if assignment.appends else items
        return
    if not assignment.appends:
        state.variables[name] = []
        if name in state.keys:
            state.keys[name] = []
    for place, item in zip(assignment.places, assignment.items, strict=True):
        if place is not None:
            _put_item(name, place, named_after(expansion.text(item), name), assignment, expansion, number)
            continue
        for word in expansion.words([item]):
            _put_at(state, name, str(_next_place(state, name)), named_after(word, name), appends=False)


def _put_item(
    name: str,
    index: Word,
    value: Value,
    assignment: Assignment,
    expansion: Expansion,
    number: Callable[[str, int], int | None],
) -> None:
    """``NAME[index]=value``; an index that only the job knows sets nothing."""
    state = expansion.state
    text = text_of(expansion.text(index))
    if name not in state.associative:
        place = number(text, assignment.line)
        if place is None:
            return
        before = state.variables.get(name)
        length = len(before) if isinstance(before, list) else int(before is not None)
        text = str(place if place >= 0 else length + place)
    _put_at(state, name, text, value, appends=assignment.appends)


def _put_at(state: State, name: str, key: str, value: Value, *, appends: bool) -> None:
    before = state.variables.get(name)
    items = list(before) if isinstance(before, list) else [before] if before is not None else []
    keys = state.keys.get(name) or [str(place) for place in range(len(items))]
    if key in keys:
        place = keys.index(key)
        items[place] = (*items[place], *value) if appends else value
    else:
        keys, items = [*keys, key], [*items, value]
    if name not in state.associative:
        order = sorted(range(len(keys)), key=lambda place: int(keys[place]))
        keys, items = [keys[place] for place in order], [items[place] for place in order]
    state.variables[name] = items
    if name in state.associative or keys != [str(place) for place in range(len(keys))]:
        state.keys[name] = keys
    else:
        state.keys.pop(name, None)


def _next_place(state: State, name: str) -> int:
    items = state.variables.get(name)
    keys: Sequence[str] = state.keys.get(name) or range(len(items) if isinstance(items, list) else 0)  # type: ignore[assignment]
    numbers = [int(key) for key in keys if str(key).isdigit()]
    return max(numbers, default=-1) + 1
