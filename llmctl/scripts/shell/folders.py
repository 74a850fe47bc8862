"""The folder in which a script's commands run: ``cd`` and its relatives, and paths that are bound to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmctl.scripts.shell.state import State
from llmctl.scripts.shell.values import Chunk, Value, absent, missing_of, text_of

_FOLDER, _BEFORE, _STACK = "PWD", "OLDPWD", "DIRSTACK"
_FINDING = ("realpath", "readlink")


def folder_of(state: State, line: int) -> Value:
    """The present folder; ``.`` is the one in which the script starts."""
    found = state.variables.get(_FOLDER)
    return found if found is not None and not isinstance(found, list) else here(line)


def here(line: int) -> Value:
    """The folder in which the script starts."""
    return (Chunk(".", line, quoted=True, is_here=True),)


def change_folder(state: State, words: Sequence[Value], line: int) -> None:
    """Carry out ``cd``, ``pushd`` or ``popd``."""
    name = text_of(words[0])
    targets = [word for word in words[1:] if text_of(word) == "-" or text_of(word)[:1] not in ("-", "+")]
    before, stack = folder_of(state, line), state.variables.get(_STACK)
    stack = list(stack) if isinstance(stack, list) else []
    if name == "popd":
        after = stack.pop(0) if stack else before
    elif not targets:
        after = (Chunk("~", line, quoted=True),) if name == "cd" else before
    elif text_of(targets[0]) == "-" and missing_of(targets[0]) is None:
        old = state.variables.get(_BEFORE)
        after = old if old is not None and not isinstance(old, list) else before
    else:
        after = below(before, targets[0], line)
        stack = [before, *stack] if name == "pushd" else stack
    state.variables.update({_FOLDER: after, _BEFORE: before, _STACK: stack})


def below(folder: Value, path: Value, line: int) -> Value:
    """A path, which is below ``folder`` if it is relative."""
    text = text_of(path)
    if not path or text.startswith(("/", "~")) or any(chunk.is_here for chunk in path):
        return path or folder
    first = next((chunk for chunk in path if chunk.text or chunk.missing is not None), path[0])
    if first.missing is not None:
        return absent(first.missing)
    if text in (".", "./") and missing_of(path) is None:
        return folder
    return (*folder, Chunk("/", line, quoted=True), *path)


def bound(words: Sequence[Value], text: str, state: State, line: int) -> Value:
    """The output of a command, which stays the same folder after a later ``cd`` if the command found a folder."""
    name, plain = text_of(words[0]), (Chunk(text, line, quoted=True),)
    if name == "pwd":
        return folder_of(state, line)
    if any(chunk.is_here for word in words[1:] for chunk in word) and name not in ("basename", "expr"):
        return tuple(replace(chunk, is_here=True) for chunk in plain)
    if name in _FINDING and not text.startswith(("/", "~")):
        return below(folder_of(state, line), plain, line)
    return plain
