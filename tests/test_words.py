"""The words of code and documents: plain English."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = {
    "llmctl": "*.py",
    "trainer": "*.py",
    "csrc": "*.[ch]*",
    "templates": "*.j2",
    "tests": "*.py",
    "docs": "*.md",
    ".": "*.md",
}
# "is no valid file" -> "is not a valid file"; "there is no file" and "is no longer" are fine.
IS_NO = re.compile(r"(?<!there )(?<!There )\b(is|are|was|were) no (?!longer\b)[A-Za-z{`]")


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_no_thing(place: str) -> None:
    folder = ROOT / place
    paths = folder.glob(PLACES[place]) if place == "." else folder.rglob(PLACES[place])
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {found[0]}..."
        for path in sorted(paths)
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := IS_NO.search(line))
    ]
    assert wrong == []
