"""The schemas of the documents of ``--json``: every command has one, and each refuses what is not in it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from llmctl.cli.main import main
from llmctl.cli.reference.documents import DOCUMENTS
from llmctl.operate.nodes import STATES
from tests.command_surface import surface
from tests.llmctl.documents import problems_of


def document_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words] if "--json" in words else [*words, "--json"]) in (0, 4)
    return json.loads(capsys.readouterr().out)


def objects_in(document: Any) -> Iterator[dict[str, Any]]:
    """The objects with fields, at any depth."""
    if isinstance(document, dict):
        yield document
    for inner in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from objects_in(inner)


def parts_in(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if "properties" in schema and isinstance(schema.get("type"), str):
            yield schema
        for inner in schema.values():
            yield from parts_in(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from parts_in(inner)


def test_every_command_with_json_has_a_schema() -> None:
    with_json, command = set(), ""
    for line in surface().splitlines():
        if not line.startswith(" "):
            command = "-".join(line.split()[1:])
        elif line.strip() == "--json":
            with_json.add(command)
    assert with_json == set(DOCUMENTS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_field_is_described_and_no_object_is_open(name: str) -> None:
    parts = [*parts_in(DOCUMENTS[name]())]
    assert parts
    for part in parts:
        assert part["additionalProperties"] is False
        assert all(field["description"] for field in part["properties"].values())


def test_states_are_enumerations() -> None:
    nodes = DOCUMENTS["nodes"]()["anyOf"][0]["properties"]
    state = nodes["nodes"]["items"]["properties"]["state"]
    assert state["enum"] == list(STATES) and "down" in STATES
    assert nodes["queues"]["items"]["properties"]["states"]["propertyNames"] == {"enum": list(STATES)}
    check = DOCUMENTS["doctor"]()["properties"]["checks"]["items"]["properties"]["state"]
    assert check["enum"] == ["ok", "note", "warning", "FAULT"]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    "words",
    [
        ("submit", "--dry-run", "--example"),
        ("submit", "--dry-run", "--run-id", "c", "--json", "--", "true"),
        ("plan", "--set", "training.device=cpu"),
        ("clusters", "list"),
        ("clusters", "show", "local"),
        ("clusters", "show", "abci3"),
        ("nodes",),
        ("nodes", "--excluded"),
        ("doctor",),
        ("status",),
        ("list",),
    ],
)
def test_a_document_with_another_or_without_a_field_is_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name = next(each for each in ("-".join(words[:2]), words[0]) if each in DOCUMENTS)
    document = document_of(capsys, *words)
    assert problems_of(name, document) == []
    found = document if isinstance(document, dict) else document[0]
    found["more_than_before"] = 1
    assert problems_of(name, document)
    del found["more_than_before"]
    for key in set(found) - {"script", "commands"}:
        value = found.pop(key)
        assert problems_of(name, document), key
        found[key] = value
