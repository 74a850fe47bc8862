"""``llmctl docs``: every page by its name, path and title; on a terminal, in a pipe, and in a browser."""

import os
import pty
import re
import subprocess
import sys
import webbrowser

import pytest

from llmctl.cli.main import main
from llmctl.cli.reference import docs
from tests.docs.shown_commands import ROOT
from tests.waiting import HANG_S

FILES = [path for name in docs.FOLDERS for path in sorted((ROOT / "docs" / name).glob("*.md"))]
PAGES = docs.pages()


def said(capsys, *words: str, code: int = 0) -> str:
    assert main(["docs", *words]) == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


def test_the_list_has_every_page_with_one_line(capsys):
    lines = said(capsys).splitlines()
    assert sorted(page.path for page in PAGES) == sorted(FILES)
    assert [line.split()[0] for line in lines] == [page.short for page in PAGES]
    assert all(page.line and not re.search(r"[`\[\]]", page.line) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_by_its_name_path_and_title(capsys, page):
    text = page.path.read_text()
    for name in (page.short, page.name, f"{page.name}.md", f"docs/{page.name}.md"):
        assert said(capsys, name) == text
    assert said(capsys, page.name, "--path") == f"{page.path}\n"
    assert docs.page_called(page.title.upper()).title == page.title


def test_paths(capsys):
    assert said(capsys, "--path") == f"{ROOT}/docs\n"
    assert said(capsys, "config", "--path") == f"{ROOT}/docs/guide/config.md\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("confg", "did you mean config or reference/config?"),
        ("tokenizer", "did you mean tokenizers?"),
        ("zzzz", "`llmctl docs` lists the pages"),
        ("../../etc/passwd", "`llmctl docs` lists the pages"),
    ],
)
def test_a_wrong_name(capsys, name, hint):
    assert said(capsys, name, code=2) == f"llmctl: PAGE: no page is called {name!r}; {hint}\n"


def test_pictures_are_captions_and_links_their_words():
    text = "<!-- needs: a GPU -->\n[a](b.md#c) ![d e](../f.svg) `[g](h)` [`i`](j.md) [k](https://e.org)"
    assert docs.for_terminal(text) == "a *Picture: d e* `[g](h)` `i` [k](https://e.org)"
    left = [page.name for page in PAGES if re.search(r"\]\((?!https?:)", docs.for_terminal(page.path.read_text()))]
    assert left == []


def on_terminal(*words: str, **environment: str) -> str:
    """The page that ``llmctl docs`` shows on a terminal of 80 columns."""
    master, slave = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("PAGER", "LESS", "NO_COLOR", "DISPLAY")}
    env = {**kept, "COLUMNS": "80", "TERM": "xterm-256color", **environment}
    argv = [sys.executable, "-m", "llmctl", "docs", *words]
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:
        pass  # the end of a terminal
    os.close(master)
    assert process.wait(HANG_S) == 0, shown
    return shown.decode()


def test_a_terminal_shows_the_page_through_the_pager(tmp_path):
    pager = tmp_path / "my pager"
    pager.write_text("#!/bin/sh\necho paged by $1 with LESS=$LESS\ncat\n")
    pager.chmod(0o755)
    shown = on_terminal("seeing-a-run", PAGER=f"'{pager}' me")
    assert "paged by me with LESS=FRX" in shown and "\x1b[" in shown and "Picture: One run on the live" in shown
    plain = on_terminal("seeing-a-run", PAGER=f"'{pager}'", NO_COLOR="1")
    assert (
        not re.search(r"\x1b\[[0-9;]*3[0-7]m", plain)
        and max(map(len, plain.splitlines())) <= 80 + len("\x1b[1m\x1b[0m") * 4
    )


@pytest.mark.parametrize("environment", [{"PAGER": "none-of-this-name"}, {"PAGER": ""}, {"TERM": "dumb"}])
def test_a_terminal_without_a_pager_shows_the_page(environment):
    shown = on_terminal("exit-codes", **environment)
    assert "Exit codes" in shown and "An invalid flag or argument" in shown


class FoundMetadata:
    """Metadata of a wheel with addresses."""

    def get_all(self, name: str) -> list[str]:
        assert name == "Project-URL"
        return ["Source, https://code.example/llmctl", "Documentation, https://docs.example/llmctl/"]


def test_a_page_opens_in_the_browser_where_the_site_has_an_address(capsys, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("importlib.metadata.metadata", lambda _: FoundMetadata())
    monkeypatch.setattr(docs, "is_for_people", lambda: True)
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    monkeypatch.setenv("DISPLAY", ":0")
    for name, place in (("config", "guide/config.html"), ("sites", "sites/index.html")):
        assert said(capsys, name) == f"https://docs.example/llmctl/{place}\n"
        assert opened.pop() == f"https://docs.example/llmctl/{place}"
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PAGER", "")
    assert "The training config" in said(capsys, "config") and opened == []


def test_the_address_of_the_site_is_the_same_in_both_places():
    project = re.findall(r"^Documentation = \"(.*)\"$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project == re.findall(r"^site_url: (\S+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
