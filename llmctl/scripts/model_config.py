"""The flags that a ``model_config.yaml`` of Megatron-LM's functional tests lists, as a training script.

Megatron-LM's runner (tests/functional_tests/shell_test_utils/_run_training.sh) exports ENV_VARS, and passes each flag
of MODEL_ARGS with its words to the program. The script has every word on its line of the file, so that messages and
comments name the lines of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from llmctl.scripts.errors import ScriptError, all_problems

_Entries = dict[str, tuple[int, yaml.Node]]
FLAGS = "MODEL_ARGS"
PROGRAM = "TRAINING_SCRIPT_PATH"
"""Variable that names the program, as in the runner."""
_VARIABLES = "ENV_VARS"
_COMMANDS = "BEFORE_SCRIPT"
_ENDINGS = (".yaml", ".yml")
_PROGRAM_OF = {
    "gpt": "pretrain_gpt.py",
    "moe": "pretrain_gpt.py",
    "mixtral": "pretrain_gpt.py",
    "bert": "pretrain_bert.py",
    "t5": "pretrain_t5.py",
    "hybrid": "pretrain_hybrid.py",
    "nemotron": "pretrain_hybrid.py",
}
"""Program of the tests in the folder of a model."""
_ONE_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_NAME = re.compile(r"[A-Za-z_]\w*")
_MERGE = "tag:yaml.org,2002:merge"
_FLAG = re.compile(r"--[\w-]+")


def script_of_config(text: str, path: Path, given: Mapping[str, str]) -> str | None:
    """A script with the flags, variables and lines of a ``model_config.yaml``; None for a file of another kind.

    Args:
        text: of the file.
        path: of the file; the folder of its model tells the program.
        given: by --arg; TRAINING_SCRIPT_PATH is the program in another place.

    Raises:
        ScriptError: the file is not valid, lists no flags of Megatron-LM, or leaves the program open.
    """
    if path.suffix not in _ENDINGS:
        return None
    found = _entries(text)
    if FLAGS not in found:
        raise ScriptError(
            0, f"is neither a shell script nor a model_config.yaml of Megatron-LM, which lists flags under {FLAGS}"
        )
    line, _ = found[FLAGS]
    mode_line, mode = found.get("MODE", (0, None))
    if mode is not None and mode.value != "pretraining":
        raise ScriptError(mode_line, f"MODE: {mode.value} trains nothing; only pretraining is imported")
    default = _PROGRAM_OF.get(path.absolute().parent.parent.name)
    if default is None and PROGRAM not in given:
        raise ScriptError(line, f"the file names no program; give it with --arg {PROGRAM}=pretrain_gpt.py")
    words = [*_before(found, line), (line, f"torchrun ${{{PROGRAM}:-{default}}}"), *_flags(found)]
    by_line: dict[int, list[str]] = {}
    for place, word in words:
        by_line.setdefault(place, []).append(word)
    last = max(by_line)
    return "".join(
        " ".join(by_line.get(number, [])) + (" \\\n" if line <= number < last else "\n")
        for number in range(1, last + 1)
    )


def _before(found: _Entries, last: int) -> Iterator[tuple[int, str]]:
    """Commands that come before the program, each at its line, or at the last line that such a command can have."""
    if _COMMANDS in found:
        # It prepares the machine: the comments at the end of the config list it as they do such files.
        yield min(found[_COMMANDS][0], last), f"source {_COMMANDS};"
    problems = []
    for place, name, value in _pairs(found, _VARIABLES):
        if _NAME.fullmatch(name) and isinstance(value, yaml.ScalarNode):
            yield min(place, last), f"export {name}={_quoted(value.value)};"
        else:
            problems.append((place, f"{_VARIABLES}, {name}: is not a variable with one value"))
    if problems:
        raise all_problems(problems)


def _flags(found: _Entries) -> Iterator[tuple[int, str]]:
    """The words of all flags, each at its line, or at the first line that a flag can have."""
    first, _ = found[FLAGS]
    problems = []
    for place, flag, value in _pairs(found, FLAGS):
        if _FLAG.fullmatch(flag):
            yield from ((max(place, first), word) for word in _words(place, flag, value))
        else:
            problems.append((place, f"{FLAGS}, {flag}: is not a flag of Megatron-LM, such as --num-layers"))
    if problems:
        raise all_problems(problems)


def _entries(text: str) -> _Entries:
    """The file's first level: name -> line and value."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ScriptError(mark.line + 1 if mark else 0, f"is not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ScriptError(0, f"is not valid YAML: {error}") from None
    finally:
        loader.dispose()
    return _merged(root, {}) if isinstance(root, yaml.MappingNode) else {}


def _merged(node: yaml.MappingNode, known: dict[int, _Entries]) -> _Entries:
    """Name -> line and value of a mapping with those that it merges (``<<``), each merged mapping read once."""
    if id(node) in known:
        return known[id(node)]
    merged: _Entries = {}
    own: _Entries = {}
    for key, value in node.value:
        if key.tag != _MERGE:
            own[str(key.value)] = (key.start_mark.line + 1, value)
            continue
        # Of several the first wins.
        for source in reversed(value.value if isinstance(value, yaml.SequenceNode) else [value]):
            if not isinstance(source, yaml.MappingNode):
                raise ScriptError(key.start_mark.line + 1, "<<: merges something that is not a mapping")
            merged |= _merged(source, known)
    known[id(node)] = merged | own
    return known[id(node)]


def _pairs(found: _Entries, name: str) -> Iterator[tuple[int, str, yaml.Node]]:
    """Line, name and value of each entry of a mapping."""
    if name not in found:
        return
    line, node = found[name]
    if not isinstance(node, yaml.MappingNode):
        raise ScriptError(line, f"{name}: is not a mapping of names to values")
    for key, (place, value) in _merged(node, {}).items():
        yield place, key, value


def _words(line: int, flag: str, node: yaml.Node) -> list[str]:
    """A flag with its values as words of a shell, divided as the runner divides them."""
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ScriptError(line, f"{flag}: is a list of lists, which no flag takes")
        return [flag, *(_quoted(item.value) for item in node.value)]
    if not isinstance(node, yaml.ScalarNode):
        raise ScriptError(line, f"{flag}: is a mapping, which no flag takes")
    if node.tag == "tag:yaml.org,2002:bool":
        return [flag] if node.value.lower() in ("true", "yes", "on") else []
    text = node.value.strip()
    if text == "true":
        return [flag]
    if node.tag == "tag:yaml.org,2002:null":
        raise ScriptError(line, f"{flag}: has no value; a flag alone has the value true")
    if not text:
        return []
    if text.startswith("[") and text.endswith("]") and "[" not in text[1:]:
        return [flag, *map(_quoted, text[1:-1].split())]
    return [flag, text if _ONE_VARIABLE.fullmatch(text) else _quoted(text)]


def _quoted(text: str) -> str:
    """One word, in which variables have their values."""
    return '"' + re.sub(r'(["`\\])', r"\\\1", " ".join(text.split())) + '"'
