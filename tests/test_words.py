"""The words of code and documents: plain English."""

import re
import subprocess
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
# On the Python index, this name is another program's.
STRANGER = re.compile(r"(?<![\w/.-])llmctl\[|\binstall (?:-\S+ )*['\"]?llmctl(?![\w/.-])")
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


def test_nothing_tells_pip_the_name_of_a_stranger() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wrong = [
        f"{name}:{number}: {found[0]}"
        for name in listed.split("\0")
        if name and not name.startswith("tests/") and (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if (found := STRANGER.search(line))
    ]
    assert wrong == []
