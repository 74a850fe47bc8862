"""Pictures of the documentation site: ``make pictures`` takes docs/pictures/site-*.png again.

The site is built as by ``make docs``, served by this machine and photographed by Chromium: the front page, the search
for a key on a page of the guide, and the reference of keys; at 1,600 pixels light and at 400 dark.
``python scripts/site_pictures.py DIR`` writes to another folder.
"""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
SIZES = {"1600-light": (1600, 1000), "400-dark": (400, 800)}
KEY = "max_skipped_steps"
PLACES = {"front": "index.html", "search": "guide/config.html", "keys": f"reference/config.html#training{KEY}"}


def main(arguments: Sequence[str]) -> int:
    """Build the site, and photograph it."""
    target = Path(arguments[0]) if arguments else ROOT / "docs/pictures"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llmctl-site-") as folder:
        argv = [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder]
        subprocess.run(argv, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
        with served(Path(folder)) as address:
            photograph(address, target)
    return 0


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Address of a folder on a server of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            del args

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def photograph(address: str, target: Path) -> None:
    """Pictures of each place at each size."""
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for size, (width, height) in SIZES.items():
            scheme = size.partition("-")[2]
            # Motion would leave the search half open.
            context = chromium.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
            )
            for name, place in PLACES.items():
                page = context.new_page()
                page.goto(f"{address}/{place}")
                if name == "search":
                    search(page)
                page.evaluate("() => Promise.all(document.getAnimations().map((each) => each.finished))")
                path = target / f"site-{name}-{size}.png"
                page.screenshot(path=path)
                print(path)
                page.close()
        chromium.close()


def search(page: Page) -> None:
    """Open the search and look for the key."""
    field = page.locator("input.md-search__input")
    # A narrow screen has a button in place of the field.
    button = page.locator("label.md-header__button[for=__search]")
    (button if button.is_visible() else field).click()
    # Before that, the page does not listen.
    page.get_by_text("Type to start searching").wait_for()
    field.press_sequentially(KEY)
    page.locator(f"a.md-search-result__link[href$='#training{KEY}']").first.wait_for()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
