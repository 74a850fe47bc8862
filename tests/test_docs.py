"""The documentation: links lead to files, and the index of each folder names every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "docs" / name for name in ("dev", "guide", "sites")]
PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]*`")


def links_of(page: Path) -> list[str]:
    """Targets of links to files of this repository, without the anchor."""
    targets = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    return [target.partition("#")[0] for target in targets if not re.match(r"\w+:|#", target)]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    assert [target for target in links_of(page) if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_index_names_every_page(folder: Path) -> None:
    index = folder / "README.md"
    linked = {(folder / target).resolve() for target in links_of(index)}
    pages = {page for page in PAGES if page.parent == folder and page != index}
    assert pages and sorted(pages - linked) == []


def test_the_first_page_is_short_and_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    assert "make demo" in text and "make test" in text
