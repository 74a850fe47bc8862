"""The schemas in an editor: yaml-language-server itself completes, explains and checks each key."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmctl.cli.reference.keys import PROFILE, all_keys
from llmctl.cli.reference.schemas import schema_text
from tests.docs.shown_commands import ROOT
from tests.llmctl.cli.reference.language_server import LanguageServer, language_server

PROGRAM = ROOT / ".make/editor/node_modules/.bin/yaml-language-server"
WRONG = "{no: {such: [value]}}"
"""A value that no key takes, but those for any mapping."""
ANY_MAPPING = ("model.rope_scaling", "hooks.settings")

pytestmark = pytest.mark.skipif(
    not PROGRAM.exists() or shutil.which("node") is None,
    reason="needs node and yaml-language-server (scripts/real_tier.sh installs it where npm is)",
)


@pytest.fixture(scope="module")
def server() -> Iterator[LanguageServer]:
    with language_server(["node", str(PROGRAM), "--stdio"]) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("editor")
    for name in ("config", "profile"):
        (folder / f"{name}.json").write_text(schema_text(name))
    return folder


def keys_of(name: str) -> list[list[str]]:
    """The parts of each key that a file of the schema may have; the user's own names are called a."""
    is_profile = name == "profile"
    found = [key.removeprefix(PROFILE) for key in all_keys() if key.startswith(PROFILE) == is_profile]
    return [key.replace("NAME", "a").split(".") for key in found]


def document(name: str, parts: list[str], value: str) -> tuple[str, int, int]:
    """A file with one key, and the line and column of the key."""
    lines = [f"# yaml-language-server: $schema={name}.json"]
    lines += [f"{'  ' * depth}{part}:" for depth, part in enumerate(parts)]
    return "\n".join(lines) + f" {value}\n", len(parts), 2 * (len(parts) - 1) + 1


@pytest.mark.parametrize("name", ["config", "profile"])
def test_each_key_is_explained_checked_and_offered(server, folder, name):
    for number, parts in enumerate(keys_of(name)):
        key = ".".join(parts)
        uri = (folder / f"{name}-{number}.yaml").as_uri()
        text, line, column = document(name, parts, WRONG)
        problems = server.open(uri, text)
        if key not in ANY_MAPPING:
            # The value is wrong, or a part of it; "Missing property" is about the rest of the file.
            assert [words for at, words in problems if at >= line - 1 and "Missing property" not in words], key
        shown = server.hover(uri, line, column)
        *sections, last = parts
        assert shown.startswith("#### " + last.replace("_", "\\_")), (key, shown)
        assert len(shown.split("\n\n")[1].split()) > 1, "the meaning is below the name"
        beginning = document(name, [*sections, "x"], "")[0].replace("x: ", last[0])
        uri = (folder / f"{name}-{number}-begun.yaml").as_uri()
        server.open(uri, beginning)
        assert last in server.completions(uri, line, column), (key, beginning)


def test_a_misspelt_key_and_a_missing_one_are_told_at_their_lines(server, folder):
    text = "# yaml-language-server: $schema=config.json\ntraining:\n  train_iter: 5\nmodel: {num_layers: 2}\n"
    problems = server.open((folder / "misspelt.yaml").as_uri(), text)
    assert (2, "Property train_iter is not allowed.") in problems
    assert any(at == 3 and words == 'Missing property "hidden_size".' for at, words in problems), problems


@pytest.mark.parametrize("name", ["config", "profile"])
def test_bundled_files_have_no_problem(server, folder, name):
    for path in sorted((ROOT / {"config": "examples", "profile": "clusters"}[name]).glob("*.yaml")):
        text = f"# yaml-language-server: $schema={name}.json\n{path.read_text()}"
        assert server.open((folder / path.name).as_uri(), text) == [], path.name
