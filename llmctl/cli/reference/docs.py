"""``llmctl docs``: the pages of the documentation, which come with llmctl."""

import difflib
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmctl.cli.console import is_for_people
from llmctl.context import Context
from llmctl.distribution import NAME
from llmctl.errors import UsageError
from llmctl.paths import BUNDLED

app = typer.Typer(rich_markup_mode=None, add_completion=False)
FOLDER = BUNDLED / "docs"
FOLDERS = ("guide", "reference", "sites")
"""Folders of pages for users. The first one with a page of a short name has the page that the name means."""
_INDEX = "README"
_ROW = re.compile(r"^\| \[[^\]]+\]\(([\w-]+)\.md\) \| (.+) \|$", re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<code>`[^`\n]*`(?!\]))|(?P<picture>!?)\[(?P<text>(?:`[^`]*`|[^\]`])*)\]\((?P<target>[^)\s]+)\)")
_WIDEST = 110
"""Columns of text beyond which lines are hard to read; tables need most of them."""


@dataclass(frozen=True)
class Page:
    """One page: ``name`` is its path below docs/ without the suffix, ``line`` says what to read it for."""

    name: str
    line: str

    @property
    def path(self) -> Path:
        """Its file."""
        return FOLDER / f"{self.name}.md"

    @property
    def title(self) -> str:
        """Its first heading."""
        with self.path.open(encoding="utf-8") as file:
            return file.readline().lstrip("# ").strip()

    @property
    def short(self) -> str:
        """Shortest word that means this page: its last name, or all of it where an earlier folder has the same."""
        folder, _, last = self.name.partition("/")
        if last == _INDEX:
            return folder
        earlier = FOLDERS[: FOLDERS.index(folder)]
        return self.name if any((FOLDER / each / f"{last}.md").exists() for each in earlier) else last


def pages() -> list[Page]:
    """Every page, in the order of the indexes of the folders."""
    found = []
    for folder in FOLDERS:
        index = Page(f"{folder}/{_INDEX}", "")
        text = index.path.read_text(encoding="utf-8")
        found.append(Page(index.name, f"{index.title}: all pages of {folder}/"))
        found += [Page(f"{folder}/{name}", _words(line)) for name, line in _ROW.findall(text)]
    return found


def _complete(incomplete: str) -> list[str]:
    return [page.short for page in pages() if page.short.startswith(incomplete)]


@app.command()
def docs(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="PAGE", help="Page by its name, path or title. Default: list all.", autocompletion=_complete
        ),
    ] = None,
    path: Annotated[bool, typer.Option("--path", help="Print the path of the page's file, or of the folder.")] = False,
) -> int:
    """List the pages of the documentation, or show one: in the terminal, and in a pipe as it is."""
    context: Context = ctx.obj
    if path:
        print(FOLDER if name is None else page_called(name).path)
        return 0
    if name is None:
        known = pages()
        width = max(len(page.short) for page in known)
        print("\n".join(f"{page.short:{width}}  {page.line}" for page in known))
        return 0
    page = page_called(name)
    address = site_address()
    if not is_for_people():
        print(page.path.read_text(encoding="utf-8"), end="")
    elif address is None or not _open_browser(f"{address}/{_place(page)}", context.environment):
        _show(for_terminal(page.path.read_text(encoding="utf-8")), context.environment)
    return 0


def page_called(name: str) -> Page:
    """The page of a name, path or title.

    Raises:
        UsageError: there is none.
    """
    word = name.casefold().removeprefix("docs/").removesuffix(".md").rstrip("/")
    known = pages()
    for page in known:
        if word in (page.short, page.name.casefold(), page.title.casefold()):
            return page
    names = {key: page.short for page in known for key in (page.title.casefold(), page.name, page.short)}
    near = [names[key] for key in difflib.get_close_matches(word, names, n=3)]
    hint = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "`llmctl docs` lists the pages"
    raise UsageError(f"PAGE: no page is called {name!r}; {hint}")


def site_address() -> str | None:
    """Public address of the documentation site: ``Documentation`` of [project.urls]; None without one."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        urls = metadata(NAME).get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    found = dict(url.split(", ", 1) for url in urls)
    return found["Documentation"].rstrip("/") if "Documentation" in found else None


def _place(page: Page) -> str:
    """The page's path on the site."""
    return f"{page.name.replace(_INDEX, 'index')}.html"


def _open_browser(address: str, environment: Mapping[str, str]) -> bool:
    """Open an address in the browser of the user's screen; False: there is none, as on a login node."""
    import webbrowser

    if not any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        return False
    opened = webbrowser.open(address)
    if opened:
        print(address)
    return opened


def for_terminal(text: str) -> str:
    """A page for a terminal: no comments, captions in place of pictures, and links to pages by their words alone."""

    def changed(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        if found["picture"]:
            return f"*Picture: {found['text']}*"
        return found[0] if re.match(r"https?:", found["target"]) else found["text"]

    return _LINK.sub(changed, _COMMENT.sub("", text))


def _words(line: str) -> str:
    """A line of an index without its markup."""
    return for_terminal(line).replace("`", "")


def _show(text: str, environment: Mapping[str, str]) -> None:
    """Show a page on the terminal, through the user's pager if there is one."""
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.theme import Theme

    has_colour = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    # Words of code without a ground of their own, which a light terminal would show as black bars.
    theme = Theme({"markdown.code": "bold cyan"})
    console = Console(highlight=False, color_system="auto" if has_colour else None, theme=theme)
    console.width = min(console.width, _WIDEST)
    with console.capture() as captured:
        console.print(Markdown(text, hyperlinks=False, code_theme="ansi_dark"))
    words = shlex.split(environment.get("PAGER", "less"))
    program = shutil.which(words[0], path=environment.get("PATH")) if words else None
    if program is None or environment.get("TERM") == "dumb":
        print(captured.get(), end="")
        return
    # F: a short page needs no pager. R: colours. X: the page stays on the screen.
    given = {"LESS": "FRX", "LESSCHARSET": "utf-8", **environment}
    subprocess.run([program, *words[1:]], input=captured.get(), text=True, encoding="utf-8", env=given, check=False)
