"""The documentation for contributors: links lead somewhere, and the index names every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/dev").glob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]*`")


def links_of(page: Path) -> list[str]:
    """Targets of links to files of this repository, without the place on the page."""
    targets = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    return [target.partition("#")[0] for target in targets if not re.match(r"\w+:|#", target)]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    assert [target for target in links_of(page) if not (page.parent / target).exists()] == []


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs/dev/README.md"
    linked = {(index.parent / target).resolve() for target in links_of(index)}
    assert [page.name for page in PAGES if page != index and page not in linked] == []
