"""The JSON schema of a type: dataclass, TypedDict or pydantic model, as a document has its fields.

Every field of the type is in the document. Docstrings describe them: an entry below ``Attributes:``, or the text below
the field.
"""

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union

from pydantic import BaseModel
from typing_extensions import NotRequired, get_original_bases, get_type_hints, is_typeddict

from llmctl.cli.reference.keys import docstrings_of

Schema = dict[str, Any]
_PLAIN: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}


def object_schema(*kinds: type) -> Schema:
    """The schema of an object with the fields of all of these types, and with no others."""
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for kind in kinds:
        meanings = meanings_of(kind)
        for name, hint in _fields(kind):
            is_optional = typing.get_origin(hint) is NotRequired
            properties[name] = {**schema_of(typing.get_args(hint)[0] if is_optional else hint)}
            # The text of a section is that of its class.
            properties[name]["description"] = meanings.get(name) or _first_line(hint)
            if not is_optional:
                required.append(name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def schema_of(hint: Any) -> Schema:
    """The schema of the values of a type.

    Raises:
        TypeError: the type has no JSON form here.
    """
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _any_of([schema_of(each) for each in inner])
    if origin is Literal:
        return {"enum": list(inner)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [each.value for each in hint]}
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or is_typeddict(hint) or issubclass(hint, BaseModel)):
        return object_schema(hint)
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        # Names are text: only those of a closed list say more.
        names = {"propertyNames": schema_of(inner[0])} if typing.get_origin(inner[0]) is Literal else {}
        return {"type": "object", **names, "additionalProperties": schema_of(inner[1])}
    if origin is tuple and inner[1:] != (...,):
        items = [schema_of(each) for each in inner]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": schema_of(inner[0])}
    raise TypeError(f"{hint}: has no JSON schema here")


def meanings_of(kind: type) -> dict[str, str]:
    """Field -> its description."""
    found: dict[str, str] = {}
    for base in get_original_bases(kind) if is_typeddict(kind) else kind.__bases__:
        if isinstance(base, type) and base is not object:
            found |= meanings_of(base)
    return {**found, **_attributes(inspect.cleandoc(kind.__doc__ or "")), **docstrings_of(kind)}


def _fields(kind: type) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=is_typeddict(kind))
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        names = [*kind.model_fields] if issubclass(kind, BaseModel) else [*hints]
    return ((name, hints[name]) for name in names)


def _any_of(options: list[Schema]) -> Schema:
    if all(set(each) == {"type"} for each in options):
        return {"type": [each["type"] for each in options]}
    return {"anyOf": options}


def _attributes(doc: str) -> dict[str, str]:
    """The entries of the section ``Attributes:`` of a docstring."""
    section = re.search(r"^Attributes:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section[1] if section else "", re.MULTILINE | re.DOTALL)
    return {name: _sentence(text) for name, text in entries}


def _first_line(hint: Any) -> str:
    line = (inspect.getdoc(hint) or "").partition("\n")[0]
    if not isinstance(hint, type) or not line:
        raise TypeError(f"{hint}: a field of this type has no docstring")
    return _sentence(line)


def _sentence(text: str) -> str:
    words = " ".join(text.replace("``", "`").split())
    return words[:1].upper() + words[1:]
