"""The line of a script that trains: launchers and containers in front, the entry point, and its flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from llmctl.scripts.directives import JobWord, excluded_nodes
from llmctl.scripts.errors import ScriptError
from llmctl.scripts.launch_words import (
    ENV,
    ENV_PAIR,
    EXCLUDE,
    FOLDER,
    IMAGE,
    LAUNCHERS,
    MOUNTS,
    NODES,
    RANKS,
    RANKS_PER_NODE,
    Launcher,
)
from llmctl.scripts.shell.assigning import OPEN_PLACE
from llmctl.scripts.shell.folders import below
from llmctl.scripts.shell.state import Run
from llmctl.scripts.shell.values import LEFT_OPEN, Chunk, Value, missing_of, plain, text_of
from llmctl.site.job import parse_nodes

_PYTHON = re.compile(r"python(3(\.\d+)?)?|pypy3?")
_TRAINS = re.compile(r"(?:.*/)?(?:pretrain_\w+|train_\w+|train|finetune\w*|main|run_\w+)\.py")
_SHELLS = ("bash", "sh", "zsh")
_SHELL_FILE = re.compile(r".*\.(sh|bash)")
_PYTHON_FILE = re.compile(r".*\.py")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SELF_DECIDED = "llmctl and the cluster's profile decide this"
_OPEN_MOUNTS = f"{LEFT_OPEN}; folders are mounted with --set job.mounts=[HOST:CONTAINER]"
_MAX_LAYERS = 20


@dataclass
class LaunchLine:
    """One command that starts Python.

    Attributes:
        line: of the script.
        entry: file or module that Python runs.
        arguments: its flags.
        sizes: meaning of a size -> its text, or None if unknown.
        words: words of launchers, with their keys of the job section or a reason.
        environment: variables of the line itself and of its launchers.
        programs: the launchers, from the outermost.
        folder: in which the program starts.
        asked: line and sentence of each word in front of the entry point that is unknown as a whole.
    """

    line: int
    entry: str = ""
    arguments: list[Value] = field(default_factory=list)
    sizes: dict[str, tuple[str | None, int, str]] = field(default_factory=dict)
    words: list[JobWord] = field(default_factory=list)
    environment: dict[str, Value] = field(default_factory=dict)
    programs: list[str] = field(default_factory=list)
    folder: Value = ()
    asked: list[tuple[int, str]] = field(default_factory=list)

    @property
    def trains(self) -> bool:
        """True if the entry point looks like a training program, known or not."""
        return bool(_TRAINS.fullmatch(self.entry)) and not self.entry.endswith(("tools/main.py", "setup.py"))


class Shells(Protocol):
    """Commands of the shells that a command starts."""

    def text(self, words: Sequence[Value], run: Run) -> list[Run]:
        """The commands of ``bash -c``."""

    def script(self, words: Sequence[Value], run: Run) -> list[Run] | None:
        """The commands of a script; None if it cannot be read."""


def read_launch_line(run: Run, shells: Shells) -> LaunchLine | None:
    """The launch line of a command; None if the command starts no Python program.

    Args:
        run: the command.
        shells: read the shells that the command starts.

    Raises:
        ScriptError: an unknown launcher in front of a training program.
    """
    found = LaunchLine(run.line, folder=run.folder)
    words = list(run.words)
    for _ in range(_MAX_LAYERS):
        words = _without_unknown(words, found)
        if not words:
            return None
        name = text_of(words[0]).rpartition("/")[2]
        # After env, say: `env A=1 torchrun ...`.
        if _ASSIGNMENT.fullmatch(text_of(words[0])) and found.programs:
            variable, _, _ = text_of(words[0]).partition("=")
            found.environment[variable] = _after(words.pop(0), len(variable) + 1)
        elif name in _SHELLS or _SHELL_FILE.fullmatch(name):
            inner = _inner_command(name, words, run, shells)
            if inner is None:
                return None
            words, found.folder = list(inner.words), inner.folder
            found.environment |= inner.environment
        elif _PYTHON.fullmatch(name):
            if not _read_python(words, found):
                return found if found.entry else None
        elif _PYTHON_FILE.fullmatch(name) and (found.programs or found.asked or "/" in text_of(words[0])):
            return _finish(words, found)
        elif name in LAUNCHERS:
            words = _read_launcher(name, words, found)
        else:
            _check_unknown(run.line, name, words)
            return None
    return None


def _trained_by(words: Sequence[Value]) -> str | None:
    """The training program among words."""
    return next((text_of(word) for word in words if re.fullmatch(r"(?:.*/)?pretrain_\w+\.py", text_of(word))), None)


def _without_unknown(words: list[Value], found: LaunchLine) -> list[Value]:
    """Words from the first known one on; unknown ones are asked for together with what the flags leave open."""
    while words and _trained_by(words) is not None:
        missing = missing_of(words[0])
        if missing is None or text_of(words[0]):
            break
        found.asked.append((missing.line, missing.problem_of_word))
        words = words[1:]
    return words


def _check_unknown(line: int, name: str, words: Sequence[Value]) -> None:
    missing = missing_of(words[0])
    trained = _trained_by(words)
    if trained is None or name in (
        "ls",
        "cat",
        "cp",
        "vi",
        "vim",
        "grep",
        "echo",
        "printf",
        "test",
        "rm",
        "git",
        "sed",
    ):
        return
    if missing is not None:
        raise ScriptError(missing.line, missing.problem)
    known = ", ".join(program for program in LAUNCHERS if program in _NAMED)
    raise ScriptError(line, f"{name} is not a known launcher in front of {trained}; known are {known}")


_NAMED = ("torchrun", "mpirun", "deepspeed", "srun", "singularity", "apptainer", "docker")


def _read_python(words: list[Value], found: LaunchLine) -> bool:
    """Read Python's own options. True if a launcher follows, as with ``-m torch.distributed.run``."""
    words.pop(0)
    while words and text_of(words[0]).startswith("-"):
        option = text_of(words.pop(0))
        if option == "-m" and words:
            module = text_of(words[0])
            if module in LAUNCHERS:
                rest = _read_launcher(module, words, found)
                words[:] = rest
                return True
            words[0] = _file_of(words[0])
            _finish(words, found)
            return False
        if option in ("-c", "-"):
            return False
        if option in ("-W", "-X") and words:
            words.pop(0)
    if words:
        _finish(words, found)
    return False


def _file_of(module: Value) -> Value:
    """The file of a module, ``megatron.pretrain_gpt``; a module without a name yet stays as it is."""
    text = text_of(module)
    if missing_of(module) is not None or text.endswith(".py"):
        return module
    return plain(f"{text.replace('.', '/')}.py", module[0].line)


def _finish(words: list[Value], found: LaunchLine) -> LaunchLine:
    found.entry = text_of(words[0])
    found.arguments = words[1:]
    return found


def _read_launcher(name: str, words: list[Value], found: LaunchLine) -> list[Value]:
    """Read a launcher's options; returns the words after them."""
    launcher, rest = LAUNCHERS[name], words[1:]
    found.programs.append(name)
    while rest and text_of(rest[0]) in launcher.verbs:
        rest.pop(0)
    # Where an image or a host follows, an unknown word may be it.
    is_option = not launcher.is_image and not launcher.operands
    rest = _without_unknown(rest, found) if is_option else rest
    while rest and (text := text_of(rest[0])).startswith("-") and len(text) > 1:
        word = rest.pop(0)
        if text == "--":
            break
        option, equals, _ = text.partition("=")
        key = option.lstrip("-").replace("-", "_")
        if key in launcher.modules:
            return [_file_of(rest[0]), *rest[1:]] if rest else rest
        takes = 2 if key in launcher.paired else 1 if key in launcher.meant or key in launcher.valued else 0
        if equals:
            values = [_after(word, len(option) + 1)]
        else:
            values, rest = rest[:takes], rest[takes:]
        _note(launcher, key, option, values, found, word)
        rest = _without_unknown(rest, found) if is_option else rest
    rest = rest[launcher.operands :]
    if launcher.is_image and rest:
        image = rest.pop(0)
        _image(image, "image", found)
    return rest


def _note(launcher: Launcher, key: str, option: str, values: list[Value], found: LaunchLine, word: Value) -> None:
    line = word[0].line if word else found.line
    shown = " ".join([option, *(text_of(value) for value in values)])
    meaning = launcher.meant.get(key)
    value = values[0] if values else ()
    if meaning in (NODES, RANKS_PER_NODE, RANKS):
        digits = re.search(r"(\d+)$", text_of(value).partition(":")[0] if key == "nnodes" else text_of(value))
        known = digits[1] if digits is not None and missing_of(value) is None else None
        found.sizes[meaning] = (known, line, shown)
    elif meaning == IMAGE:
        _image(value, option, found)
    elif meaning == MOUNTS:
        found.words += _mounts(value, shown, line)
    elif meaning == EXCLUDE:
        found.words.append(excluded_nodes(line, shown, [] if missing_of(value) else parse_nodes(text_of(value))))
    elif meaning == FOLDER:
        found.folder = below(found.folder, value, line)
    elif meaning in (ENV, ENV_PAIR):
        name, equals, _ = text_of(value).partition("=")
        if meaning == ENV_PAIR and len(values) > 1:
            found.environment[name] = values[1]
        elif equals:
            found.environment[name] = _after(value, len(name) + 1)
    else:
        found.words.append(JobWord(line, shown, reason=_SELF_DECIDED))


def _mounts(value: Value, shown: str, line: int) -> list[JobWord]:
    text = text_of(value)
    if OPEN_PLACE.search(text):
        return [JobWord(line, shown, reason=_OPEN_MOUNTS, is_told=True)]
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in text.split(",") if mount]
    return [JobWord(line, shown, "mounts", mounts)] if missing_of(value) is None else []


def _image(value: Value, option: str, found: LaunchLine) -> None:
    missing = missing_of(value)
    if missing is not None:
        raise ScriptError(missing.line, missing.problem)
    line = value[0].line if value else found.line
    found.words.append(JobWord(line, f"{option} {text_of(value)}", "container", text_of(value)))


def _inner_command(name: str, words: list[Value], run: Run, shells: Shells) -> Run | None:
    """The only command of a shell, or of a script, that could train."""
    if name in _SHELLS:
        return _shell_command(words, run, shells)
    found = _command_of_script(words, run, shells)
    if found is None:
        _check_unknown(run.line, name, words)
    return found


def _shell_command(words: list[Value], run: Run, shells: Shells) -> Run | None:
    """The only command of ``bash -c``, or of ``bash FILE``, that could train."""
    options = 1
    while options < len(words) and text_of(words[options])[:1] in ("-", "+") and missing_of(words[options]) is None:
        option = text_of(words[options])
        if re.fullmatch(r"-\w*c", option):
            text = shells.text(words[options + 1 : options + 2], run) if options + 1 < len(words) else []
            inner = [one for one in text if any(".py" in text_of(word) for word in one.words)]
            return inner[-1] if inner else _training_command(text, option, run, shells)
        options += 2 if option in ("-o", "+o", "-O", "+O", "--rcfile", "--init-file") else 1
    return _command_of_script(words[options:], run, shells) if options < len(words) else None


def _command_of_script(words: list[Value], run: Run, shells: Shells) -> Run | None:
    """The only command of a script that trains."""
    return _training_command(shells.script(words, run) or (), text_of(words[0]), run, shells)


def _training_command(commands: Sequence[Run], shown: str, run: Run, shells: Shells) -> Run | None:
    """The only command that trains, by itself or in a script that it starts.

    Raises:
        ScriptError: two commands train.
    """
    found = []
    for one in commands:
        launch = read_launch_line(one, shells)
        if launch is not None and launch.trains:
            found.append(one)
    loops = {one.loops[-1][0]: one.loops[-1][1] for one in reversed(found) if one.loops}
    if len(found) > 1 and len(loops) == 1 and len({one.line for one in found}) == 1:
        ((name, first),) = loops.items()
        problem = f"{shown} starts a training program in a loop over {name}; a config has one"
        remedy = f"give one round with --arg {name}=VALUE, such as {first}"
        raise ScriptError.asking(run.line, f"{problem}: {remedy}", name, [first])
    if len(found) > 1:
        raise ScriptError(
            run.line, f"{shown} starts a training program twice; a config has one: leave one in the script"
        )
    return found[0] if found else None


def _after(value: Value, length: int) -> Value:
    """A value without its first characters."""
    left = length
    found: list[Chunk] = []
    for chunk in value:
        cut = min(left, len(chunk.text))
        left -= cut
        if chunk.text[cut:] or chunk.missing is not None or not found:
            found.append(replace(chunk, text=chunk.text[cut:]))
    return tuple(found)
