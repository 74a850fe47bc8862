"""The pictures of the documentation: their script, and the files that it has written."""

import re
import runpy
from pathlib import Path

import pytest

from tests.docs.shown_commands import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts/pictures.py"))
PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("10%\r20%\r30%\r\nend", ["30%", "end"]),
        ("bar\r\x1b[2Klog\r\nbar 2\r\x1b[2K\x1b[?25h", ["log"]),
        ("log\r\nbar\r\nbar 2\x1b[1A\rnew\r\n", ["log", "new", "bar 2"]),
        ("\x1b[1mbold\x1b[0m text", ["\x1b[1mbold\x1b[0m text"]),
    ],
)
def test_the_last_state_of_a_line_is_kept(written: str, lines: list[str]) -> None:
    assert SCRIPT["screen_lines"](written) == lines


def test_a_picture_has_the_text_in_its_colours() -> None:
    drawn = {theme: SCRIPT["svg"](["\x1b[32mcompleted\x1b[0m", "x" * 81], 80, theme) for theme in SCRIPT["THEMES"]}
    for theme, picture in drawn.items():
        colour = SCRIPT["THEMES"][theme].ansi_colors[2]
        assert "completed" in picture and f"fill: #{colour[0]:02x}{colour[1]:02x}{colour[2]:02x}" in picture
        assert len(re.findall(">x+<", picture)) == 2, "a line that is too long continues on the next"


def test_a_picture_names_a_neutral_home() -> None:
    assert SCRIPT["neutral"](f"/tmp/h/runs {ROOT}/examples", "/tmp/h") == "/home/you/runs /home/you/llmctl/examples"


def test_every_screen_has_its_pictures() -> None:
    ends = [f"{width}{theme}.svg" for width in ("-", "-120-") for theme in ("light", "dark")]
    assert [path.name for path in PICTURES] == sorted(
        name + end for name in (*SCRIPT["SCREENS"], *SCRIPT["LIVE"]) for end in ends
    )


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_small_and_private(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 100_000
    # The name space of SVG is the only address: nothing is loaded from a network.
    assert re.findall(r"https?://[^\"']*", text) == ["http://www.w3.org/2000/svg"]
    assert "url(http" not in text and not re.search(r"/(root|tmp|work|Users|mnt)\b|/home/(?!you\b)", text)


def test_the_page_of_a_run_has_its_pictures() -> None:
    """At both widths, light and dark, as ``scripts/page_pictures.py`` writes them."""
    found = {path.name: path.read_bytes() for path in (ROOT / "docs/pictures").glob("report-*.png")}
    assert found.keys() == {f"report-{width}-{scheme}.png" for width in (400, 1600) for scheme in ("light", "dark")}
    for name, data in found.items():
        assert int.from_bytes(data[16:20], "big") == int(name.split("-")[1]), "the width in the header of a PNG"
        assert len(data) < 600_000


def test_the_site_has_its_pictures() -> None:
    """As ``scripts/site_pictures.py`` writes them."""
    script = runpy.run_path(str(ROOT / "scripts/site_pictures.py"))
    found = {path.stem: path.read_bytes() for path in (ROOT / "docs/pictures").glob("site-*.png")}
    assert found.keys() == {f"site-{name}-{size}" for name in script["PLACES"] for size in script["SIZES"]}
    for name, data in found.items():
        width, height = (int.from_bytes(data[place : place + 4], "big") for place in (16, 20))
        assert (width, height) == script["SIZES"]["-".join(name.split("-")[2:])]
        assert len(data) < 250_000


def test_the_first_page_shows_pictures_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
    assert len(shown) == 2 and all((ROOT / path).is_file() for path in shown)
