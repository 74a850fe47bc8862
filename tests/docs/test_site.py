"""The documentation site: complete, without broken links, quiet in a browser; and its pages made from the code."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright
from pydantic import BaseModel

from llmctl import errors
from llmctl.cli.reference.keys import Key, all_keys
from scripts.reference.__main__ import PAGES, outdated
from scripts.reference.commands import help_blocks
from scripts.reference.config_keys import key_block
from scripts.reference.markdown import MissingText, prose, table
from scripts.site_pages import links_for_the_site
from scripts.site_pictures import served
from tests.docs.shown_commands import ROOT
from tests.waiting import HANG_S
from trainer.__main__ import COMMANDS as TRAINER_COMMANDS
from trainer.config.help.page import HelpPage, Row, Section
from trainer.config.records.row_fields import FIELDS
from trainer.process.metrics import SpeedScale, missed_row, tasks_row, training_row, validation_row
from trainer.process.progress import TrainingProgress
from trainer.trackers.scalars import NAMES

FOLDERS = ("benchmarks", "clusters", "csrc", "examples", "llmctl", "templates", "tests", "trainer")


def build(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout, as ``make docs`` does."""
    argv = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(target)]
    return subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_reference_is_as_the_code_is_now():
    assert outdated() == [], "run python -m scripts.reference"


def test_every_key_has_its_heading():
    text = "".join(PAGES[name]() for name in ("config.md", "profiles.md"))
    missing = [key for key in all_keys() if f"\n### {key.removeprefix('profile.')}\n" not in text]
    assert missing == []


def test_a_key_without_a_text_is_refused():
    class Parts(BaseModel):
        known: int = 1

    with pytest.raises(MissingText, match=r"^parts.known: has no text; write one below the field, in tests.docs"):
        key_block(Key("parts.known", Parts, "known"))


def test_every_command_and_flag_is_on_the_page_of_commands():
    text = PAGES["commands.md"]()
    missing = []
    for line in (ROOT / "tests/command_surface.txt").read_text().splitlines():
        words = line.split()
        wanted = f" {line}\n" if line.startswith("llmctl") else words[0] if words[0].startswith("-") else ""
        missing += [line] if wanted not in text else []
    assert missing == []
    assert [name for name in TRAINER_COMMANDS if f"`{name}`" not in text] == []


def test_a_flag_without_a_text_is_refused():
    page = HelpPage("llmctl do", ("Do something.",), (Section("Options", (Row("--fast", ""),)),))
    with pytest.raises(MissingText, match="llmctl do --fast: has no text"):
        list(help_blocks("llmctl do", page))


def test_every_field_of_a_row_has_its_description():
    speed = SpeedScale(1, 1, 1, None)
    numbers = {"grad_norm": 1.0, "learning_rate": 1.0, "loss_scale": 1.0, "iteration_time_s": 1.0}
    rows = [
        training_row(1, TrainingProgress(), speed, **numbers, peak_memory_bytes=1),
        validation_row(1, 1, 1.0, {"sop_loss": 1.0}),
        tasks_row(1, 1, {}),
        missed_row(1, 1, "the disk is full"),
    ]
    sources = [ROOT / "trainer/training" / name for name in ("step_numbers.py", "step_hooks.py")]
    named = {name for path in sources for name in re.findall(r'row\["(\w+)"\] = |return \{"(\w+)":', path.read_text())}
    written = {name for row in rows for name in row} | {one or other for one, other in named}
    written |= {name for name in NAMES if "/" not in name}
    assert written - FIELDS.keys() == set()
    assert {"params_norm", "metrics", "valid_sop_loss", "batch_size"} <= written


def test_the_exit_codes_are_those_of_the_errors():
    text = PAGES["exit-codes.md"]()
    codes = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert [number for number in (0, *codes, errors.INTERRUPTED) if f"\n| {number} | " not in text] == []


def test_words_of_the_code_are_not_markup():
    assert prose("a <b> times *c*, `<d>*`") == "a &lt;b> times \\*c\\*, `<d>*`"
    assert table(("a", "b"), [("x|y", "z")]) == "| a | b |\n| --- | --- |\n| x\\|y | z |"


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("guide/data.md", "[a](models.md#b)", "[a](models.md#b)"),
        ("guide/data.md", "[a](../../CHANGELOG.md)", "[a](../CHANGELOG.md)"),
        ("README.md", "[a](docs/guide/data.md#b)", "[a](guide/data.md#b)"),
        ("README.md", '<img src="docs/pictures/plan-light.svg">', '<img src="pictures/plan-light.svg">'),
        ("guide/t5.md", "[`t5`](../../examples/t5_base.yaml)", "`t5`"),
        ("guide/t5.md", "`[a](../../examples)` [b](#c) [d](https://e.org/f)", None),
        ("guide/t5.md", "```\n[a](../../examples)\n```\n", None),
    ],
)
def test_links_lead_to_the_pages_of_the_site(source, text, expected):
    assert links_for_the_site(text, source, None) == (text if expected is None else expected)


def test_links_lead_to_the_repository_where_it_has_an_address():
    text = links_for_the_site("[t5](../../examples/t5_base.yaml)", "guide/t5.md", "https://code.example/llmctl/")
    assert text == "[t5](https://code.example/llmctl/blob/main/examples/t5_base.yaml)"


def test_a_broken_link_or_anchor_and_a_page_outside_the_menu_fail_the_build(tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(ROOT / "docs", root / "docs")
    (root / "scripts").mkdir()
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "LICENSE", ROOT / "scripts/site_pages.py"):
        shutil.copy2(path, root / path.relative_to(ROOT))
    for name in FOLDERS:
        (root / name).symlink_to(ROOT / name)
    page = root / "docs/guide/data.md"
    page.write_text(f"{page.read_text()}\n[a](none.md) [b](models.md#none) [c](../../examples/none.yaml)\n")
    (root / "docs/guide/new.md").write_text("# New\n")
    done = build(root, tmp_path / "site")
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert said.count("WARNING -") == 4, said
    for words in ("'none.md'", "'models.md#none'", "docs/guide/data.md: ../../examples/none.yaml: no such file"):
        assert words in said, said
    assert "guide/new.md" in said and "Aborted with 4 warnings in strict mode" in said


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with served(site) as found:
        yield found


@pytest.mark.programs("chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_search_finds_a_key_and_nothing_is_loaded_from_elsewhere(address, scheme):
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_context(color_scheme=scheme).new_page()
        page.set_default_timeout(HANG_S * 1000)
        noise: list[str] = []
        page.on("request", lambda request: noise.append(request.url) if address not in request.url else None)
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("response", lambda response: noise.append(response.url) if response.status >= 400 else None)
        page.goto(f"{address}/index.html")
        assert (
            page.locator("body").get_attribute("data-md-color-scheme") == {"light": "default", "dark": "slate"}[scheme]
        )
        page.locator("input.md-search__input").click()
        # Before that, the page does not listen.
        page.get_by_text("Type to start searching").wait_for()
        page.locator("input.md-search__input").press_sequentially("max_skipped_steps")
        page.locator("a.md-search-result__link[href$='#trainingmax_skipped_steps']").first.click()
        page.wait_for_url("**/reference/config.html?*")
        assert "End the run as failed after this many steps in a row" in page.locator("article").inner_text()
        chromium.close()
    assert noise == []


@pytest.mark.programs("chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_pages_are_accessible_and_as_wide_as_the_screen(address, width, scheme):
    """By axe-core, at its levels serious and critical; the theme alone has a milder one: buttons that copy code."""
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        for place in ("index.html", "guide/troubleshooting.html", "guide/runs-and-files.html", "reference/config.html"):
            page.goto(f"{address}/{place}")
            found = Axe().run(page).response["violations"]
            severe = [
                (rule["id"], rule["nodes"][0]["html"]) for rule in found if rule["impact"] in ("serious", "critical")
            ]
            assert severe == [], place
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        chromium.close()
