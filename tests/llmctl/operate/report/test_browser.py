"""The page in a real browser: accessible, quiet, readable at every width, usable by keyboard.

axe-core 4.12 checks the rules of WCAG 2.2 that a program can check.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from llmctl.context import Context
from llmctl.operate.report.gather import gather_runs
from llmctl.operate.report.page import page_of
from tests.llmctl.operate.report.made_runs import HOSTILE, add, made_run, trained

pytestmark = pytest.mark.programs("chromium")
WIDTHS, SCHEMES = (400, 1600), ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of one hostile run that failed and was resumed, of three runs, and of a COMMAND."""
    folder = tmp_path_factory.mktemp("pages")
    environment = {
        "XDG_STATE_HOME": f"{folder}/state",
        "LLMCTL_RUNS_ROOT": f"{folder}/runs",
        "PATH": os.environ["PATH"],
    }
    context = Context.of((), (), environment | {"HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}, folder)
    hostile = trained(made_run(folder / "runs", name=HOSTILE, command=("llmctl", HOSTILE)), resumes_at=21)
    (hostile.path / "attempts/1/rank-00001.log").write_text(HOSTILE)
    others = [
        trained(
            made_run(folder / "runs", f"run{number}-261127-120000-abcd", name=f"run{number}"), steps=3000, loss=number
        )
        for number in (1, 2)
    ]
    command = made_run(folder / "runs", "hello-261127-120000-abcd", name="hello", config=None).submit(None)
    entries = {run.record.name: add(context, run) for run in (hostile, *others, command)}
    chosen = {"one": [HOSTILE], "several": [*entries][:3], "command": ["hello"]}
    paths = {}
    for name, runs in chosen.items():
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(page_of(gather_runs(context, [entries[run] for run in runs])), encoding="utf-8")
    return paths


def opened(browser: Browser, path: Path, width: int = 1600, scheme: str = "light") -> tuple[Page, list[str]]:
    """A page, and the list of what it should not do: requests, messages of its console, errors, dialogs."""
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    noise: list[str] = []
    page.on("request", lambda request: noise.append(f"request {request.url}"))
    page.on("console", lambda message: noise.append(f"console {message.text}"))
    page.on("pageerror", lambda error: noise.append(f"error {error}"))
    page.on("dialog", lambda dialog: (noise.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.goto(path.as_uri())
    assert noise.pop(0) == f"request {path.as_uri()}"
    return page, noise


@pytest.mark.parametrize("name", ["one", "several", "command"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_is_accessible_quiet_and_as_wide_as_the_screen(browser, pages, name, width, scheme):
    page, noise = opened(browser, pages[name], width, scheme)
    found = Axe().run(page)
    assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found.response["violations"]] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".plot canvas").count() == {"one": 5, "several": 5, "command": 0}[name]
    assert noise == []
    page.context.close()


def test_charts_are_drawn_over_steps_tokens_and_time(browser, pages):
    page, noise = opened(browser, pages["several"])
    before = drawn(page)
    assert all(ink for _, ink in before)
    texts = []
    for axis in ("steps", "tokens", "time"):
        page.get_by_role("radio", name=axis).check(force=True)
        page.locator(".plot").first.hover(position={"x": 700, "y": 150})
        texts.append(page.locator(".readout").first.inner_text())
    assert texts[0].startswith("step 1,") and " tokens " in texts[1].replace("\u00b7", " ") and " min " in texts[2]
    assert all("run1-261127-120000-abcd 1.0" in text for text in texts)
    page.get_by_role("checkbox", name="logarithmic loss").check()
    assert [picture for picture, _ in drawn(page)] != [picture for picture, _ in before]
    assert noise == []
    page.context.close()


def test_a_hidden_run_is_not_drawn_nor_read(browser, pages):
    page, _ = opened(browser, pages["several"])
    before = drawn(page)
    page.get_by_role("checkbox", name="run1-261127-120000-abcd").uncheck()
    page.locator(".plot").first.hover(position={"x": 700, "y": 150})
    assert "run1" not in page.locator(".readout").first.inner_text()
    assert "run2" in page.locator(".readout").first.inner_text()
    assert drawn(page)[0] != before[0]
    page.context.close()


def test_the_keyboard_reaches_and_reads_everything(browser, pages):
    page, _ = opened(browser, pages["one"])
    names, shown = [], []
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            """() => {
                const one = document.activeElement;
                const ring = one.type === "radio" ? one.nextElementSibling : one;
                const name = one.className || one.id || one.name || one.tagName;
                return [name, getComputedStyle(ring).outlineStyle];
            }"""
        )
        if name == "BODY":
            break
        names.append(name)
        shown.append(outline)
    assert names[0] == "skip" and {"axis", "log", "whole", "plot", "scroll", "SUMMARY", "PRE"} <= set(names)
    assert set(shown) == {"solid"}
    plot = page.locator(".plot").first
    plot.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator(".readout").first.inner_text().startswith("step 3 \u00b7 loss 5.667")
    page.keyboard.press("End")
    assert page.locator(".readout").first.inner_text().startswith("step 40 \u00b7 loss 3.2")
    whole = drawn(page)
    page.keyboard.press("+")
    zoomed = drawn(page)
    assert all(one != other for one, other in zip(zoomed, whole, strict=True))
    page.keyboard.press("Escape")
    assert len(drawn(page)) == len(whole)
    page.context.close()


def test_a_hostile_name_is_only_text(browser, pages):
    page, noise = opened(browser, pages["one"])
    assert HOSTILE in page.locator("h1").inner_text()
    assert HOSTILE in page.locator("pre").first.inner_text()
    assert page.locator("img").count() == 0 and noise == []
    # The policy holds even for what would get in.
    page.evaluate("document.body.append(Object.assign(document.createElement('img'), {src: 'https://example.org/x'}))")
    page.wait_for_function("document.querySelector('img').complete")
    assert any("Content Security Policy" in line for line in noise)
    assert page.evaluate("document.querySelector('img').naturalWidth") == 0
    page.context.close()


def test_a_page_prints_on_white_paper(browser, pages, tmp_path):
    page, noise = opened(browser, pages["one"], scheme="dark")
    page.pdf(path=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert page.evaluate("document.documentElement.dataset.print") is None
    assert noise == []
    page.context.close()


def drawn(page: Page) -> list[tuple[str, bool]]:
    """Every chart as drawn once it is at rest, and whether it has many colours: lines, words and their edges."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found = page.evaluate(
        """() => JSON.stringify([...document.querySelectorAll(".plot canvas")].map((canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const pixels = new Uint32Array(data.buffer);
            return [canvas.toDataURL(), new Set(pixels).size > 10];
        }))"""
    )
    return [tuple(one) for one in json.loads(found)]
