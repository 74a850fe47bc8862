"""Every key of a config and of a cluster profile, with what its field says: values, default, flags and meaning.

``llmctl explain`` prints them, and the pages below docs/reference are made of them.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import BaseModel

PROFILE = "profile."
"""Before the keys of a cluster profile, which have names of their own in its file."""
JOB = "job."
"""Before the keys that flags of ``llmctl submit`` set."""
NAME = "NAME"
"""The part of a dotted key that the user chooses, such as the name of a kind of node."""

FROM_MEANING = "Checkpoint, Hugging Face folder or GGUF file whose shape the model takes, without its weights."
"""Of ``model.from``, which no field of a section has: the shape replaces it before the config is checked."""


class Key(NamedTuple):
    """A field of a section.

    Attributes:
        name: dotted, with ``profile.`` before the keys of a profile.
        section: the class that has the field.
        field: name of the field.
    """

    name: str
    section: "type[BaseModel]"
    field: str


def all_keys() -> dict[str, Key]:
    """Keys by name, in the order of the sections."""
    from llmctl.site.profile import ClusterProfile
    from trainer.config.train_config import TrainConfig

    found = [*_keys_of("", TrainConfig), *_keys_of(PROFILE, ClusterProfile)]
    return {key.name: key for key in found if key.name != f"{PROFILE}name"}


def _keys_of(prefix: str, section: "type[BaseModel]") -> Iterator[Key]:
    for name, field in section.model_fields.items():
        inner, is_named = _section_in(field.annotation)
        if inner is None or is_named or not isinstance(field.annotation, type):
            yield Key(f"{prefix}{name}", section, name)
        if inner is not None:
            yield from _keys_of(f"{prefix}{name}.{f'{NAME}.' if is_named else ''}", inner)


def _section_in(annotation: Any) -> "tuple[type[BaseModel] | None, bool]":
    """The section that a field holds, if it holds one, and whether it holds several by name."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    sections = [each for each in get_args(annotation) if isinstance(each, type) and issubclass(each, BaseModel)]
    return (sections[0] if sections else None), get_origin(annotation) is dict


def flags_of(key: Key) -> list[str]:
    """Flags that set a key: the trainer's, or for the section job those of ``llmctl submit``."""
    from trainer.config.megatron_flags import ALIASES

    if key.name.startswith(PROFILE):
        return []
    if key.name.startswith(JOB):
        return list(_submit_flags().get(key.field, ()))
    named = [f"--{key.field.replace('_', '-')}"]
    return named + [f"--{flag}" for flag, alias in ALIASES.items() if alias.key == key.name]


@functools.cache
def _submit_flags() -> dict[str, tuple[str, ...]]:
    """Names of the parameters of ``llmctl submit``, which are those of the keys, and their flags."""
    from llmctl.cli.main import load_command

    return {parameter.name: tuple(parameter.opts) for parameter in load_command("submit").params}


def values_of(key: Key) -> str:
    """Valid values of a key in words."""
    schema = _schema(key.section)
    return _words(schema["properties"][key.field], schema.get("$defs", {}))


def default_of(key: Key) -> str:
    """``required``, or the default in words."""
    if key.section.model_fields[key.field].is_required():
        return "required"
    return f"default {plain(_schema(key.section)['properties'][key.field].get('default'))}"


def meaning_of(key: Key) -> str:
    """The text below the field in the source; empty if there is none."""
    return docstrings_of(key.section).get(key.field, "")


@functools.cache
def _schema(section: "type[BaseModel]") -> dict[str, Any]:
    return section.model_json_schema()


def _words(given: Mapping[str, Any], parts: Mapping[str, Any]) -> str:
    if "$ref" in given:
        return _words(parts[given["$ref"].rpartition("/")[2]], parts)
    if "enum" in given:
        return " or ".join(map(plain, given["enum"]))
    if "const" in given:
        return plain(given["const"])
    options = [each for each in given.get("anyOf", ()) if each.get("type") != "null"]
    if options:
        return " or ".join(dict.fromkeys(_words(each, parts) for each in options))
    kind = given.get("type")
    if kind == "array":
        items = given.get("items", {})
        return f"list of {_words(items, parts)}s" if items else "list"
    if kind == "object":
        return "mapping"
    names = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}
    bounds = [
        f"{sign} {plain(given[key])}"
        for key, sign in (
            ("exclusiveMinimum", "above"),
            ("minimum", "at least"),
            ("exclusiveMaximum", "below"),
            ("maximum", "at most"),
        )
        if key in given
    ]
    named = names.get(str(kind), "any value")
    return f"{named} {', '.join(bounds)}" if bounds else named


def plain(value: Any) -> str:
    """A value as a config file has it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else "empty" if value in ([], {}, "") else str(value)


@functools.cache
def docstrings_of(kind: type) -> dict[str, str]:
    """Key -> the text below it in the source, of a class and its bases; the nearest wins."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.split(".")[0] not in ("llmctl", "trainer"):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for before, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                found.pop(before.target.id, None)
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    found[before.target.id] = " ".join(str(after.value.value).replace("``", "`").split())
    return found
