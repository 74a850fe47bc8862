"""Hook of mkdocs: the pages of the top level join the site, and links work there as in the repository.

A page below docs/ links to others by their paths in the repository, so that the links work wherever the repository is
read. On the site, a link to a file that is not part of the site becomes a link to the repository, if mkdocs.yml names
one (``repo_url``), else its text alone.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
TOP_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_DOCS = "docs/"
# Code first: what looks like a link inside it is none.
_LINK = re.compile(
    r"(?P<fence>^(?P<ticks>```+|~~~+).*?^(?P=ticks))|(?P<code>(?<!`)`[^`\n]+`(?!`))(?!\]\()"
    r"|\[(?P<text>(?:`[^`]*`|[^\]`])*)\]\((?P<target>[^)\s]+)\)"
    r"|(?P<attribute>\b(?:src|srcset|href)=\")(?P<file>[^\"]+)(?=\")",
    re.MULTILINE | re.DOTALL,
)
_log = logging.getLogger("mkdocs.hooks.site_pages")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the top level."""
    for name in TOP_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The text of a page with links for the site."""
    del files
    if page.file.src_uri == TOP_PAGES[0]:
        # Its menu would have one entry: the page itself.
        page.meta["hide"] = ["navigation"]
    return links_for_the_site(markdown, page.file.src_uri, config.repo_url)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The page with a name for the theme's search, which screen readers read."""
    del page, config
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def links_for_the_site(markdown: str, source: str, repository: str | None) -> str:
    """Text whose links lead to pages of the site, to the repository, or are their words alone.

    Args:
        markdown: text of a page.
        source: name of the page on the site, such as ``guide/data.md``.
        repository: address of the repository; None: the project has none.
    """
    origin = source if source in TOP_PAGES else _DOCS + source

    def changed(found: re.Match[str]) -> str:
        target = found["target"] or found["file"]
        if target is None or re.match(r"\w+:|#", target):
            return found[0]
        path, mark, anchor = target.partition("#")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if place in TOP_PAGES or place.startswith(_DOCS):
            there = posixpath.relpath(place.removeprefix(_DOCS), posixpath.dirname(source) or ".")
            return f"{found['attribute']}{there}" if found["file"] else f"[{found['text']}]({there}{mark}{anchor})"
        if not (ROOT / place).exists():
            _log.warning("%s: %s: no such file", origin, target)
        if repository is None or found["text"] is None:
            return found["text"] or found[0]
        return f"[{found['text']}]({repository.rstrip('/')}/blob/main/{place}{mark}{anchor})"

    return _LINK.sub(changed, markdown)
