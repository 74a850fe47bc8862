"""The documentation: links, named files, indexes and the table of arrows."""

import ast
import re
from pathlib import Path

import pytest

from tests.test_architecture import MODULES, tree_of
from tests.test_rooms import ALLOWED, GROUND

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "docs" / name for name in ("dev", "guide", "reference", "sites")]
PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]*`")
TOPS = ("llmctl", "trainer", "csrc", "templates", "tests")
PATH = re.compile(rf"(?<![\w./~>-])(?:{'|'.join(TOPS)})/[^\s`:,;]*")
FILE = re.compile(r"[\w./-]+\.(?:py|j2|cpp|cu|cuh)\b")
MAPS = [
    *(page for page in PAGES if page.stem in ("architecture", "glossary") or page.stem.startswith("walk-")),
    FOLDERS[0] / "README.md",
]
SYMBOLS = re.compile(r"`([\w/.-]+\.py): ([\w.]+(?:, [\w.]+)*)`")
PLACEHOLDER = re.compile(r"[<>*{}]|NAME")
ARROWS = re.compile(r"^\| `(\w+)` \| ([^|\n]*) \|$", re.MULTILINE)


def links_of(page: Path) -> list[str]:
    """Targets of links to files of this repository, without the anchor."""
    targets = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    return [target.partition("#")[0] for target in targets if not re.match(r"\w+:|#", target)]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    assert [target for target in links_of(page) if not (page.parent / target).exists()] == []


def paths_in(text: str) -> list[str]:
    """Paths of this repository in the code words of a text, without placeholders."""
    found = [path for word in CODE.findall(text) for path in PATH.findall(word)]
    return [path for path in found if not PLACEHOLDER.search(path)]


def test_paths_are_found_in_code_words() -> None:
    text = "`llmctl/a.py: f`, llmctl/b.py, `cat tests/*`, `csrc/<op>/c.h`, `~/llmctl/d`, `tests/NAME`, `a trainer/e.py`"
    assert paths_in(text) == ["llmctl/a.py", "trainer/e.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    assert [path for path in paths_in(page.read_text(encoding="utf-8")) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.stem)
def test_files_named_without_their_folder_exist(page: Path) -> None:
    files = {f"/{path.relative_to(ROOT)}" for top in TOPS for path in (ROOT / top).rglob("*") if path.is_file()}
    named = [file for word in CODE.findall(page.read_text(encoding="utf-8")) for file in FILE.findall(word)]
    assert named and [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def names_in(path: Path) -> set[str]:
    """Names that a file defines, also inside classes and functions."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def missing_symbols(text: str) -> list[str]:
    """Names of ``FILE: NAME, NAME.NAME`` in the code words of a text that are not in the file."""
    wrong = []
    for file, names in SYMBOLS.findall(text):
        defined = [names_in(path) for path in MODULES.values() if f"/{path.relative_to(ROOT)}".endswith(f"/{file}")]
        for name in names.split(", "):
            if not any(set(name.split(".")) <= each for each in defined):
                wrong.append(f"{file}: {name}")
    return wrong


def test_a_symbol_that_is_not_in_its_file_is_found() -> None:
    text = "`runs/state.py: decide, nobody`, `llmctl/runs/state.py: decide.Nobody`, `llmctl/none.py: decide`"
    assert missing_symbols(text) == [
        "runs/state.py: nobody",
        "llmctl/runs/state.py: decide.Nobody",
        "llmctl/none.py: decide",
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "dev"], ids=lambda page: page.stem)
def test_named_symbols_exist(page: Path) -> None:
    assert missing_symbols(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("package", ["llmctl", "trainer"])
def test_the_table_of_arrows_is_that_of_the_rooms(package: str) -> None:
    rows = dict(ARROWS.findall((FOLDERS[0] / "architecture.md").read_text(encoding="utf-8")))
    written = {room: set(re.findall(r"`(\w+)`", rows.get(room, ""))) for room in ALLOWED[package] if room != "__main__"}
    assert written == {room: ALLOWED[package][room] - GROUND for room in written}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_index_names_every_page(folder: Path) -> None:
    index = folder / "README.md"
    linked = {(folder / target).resolve() for target in links_of(index)}
    pages = {page for page in PAGES if page.parent == folder and page != index}
    assert pages and sorted(pages - linked) == []


def test_the_first_page_is_short_and_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    # Comments and the tags of pictures are not words that a reader sees.
    assert len(re.sub("<[^>]*>", "", text).split()) <= 900
    assert "make demo" in text and "make test" in text
