"""The distribution of this llmctl, for messages that name the words of a pip install.

On the Python index the name ``llmctl`` is that of another program, so no message may give it to pip.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from llmctl.paths import PACKAGE

NAME = "llmctl-pretrain"
"""Name for pip; command and module are ``llmctl``."""
TRAINER_PACKAGES = ("numpy", "pydantic", "pyyaml", "safetensors", "tokenizers", "torch", "zlib-ng")
"""Packages of the extra ``train`` and of the trainer's config."""


def install_words(*, elsewhere: bool = False) -> str:
    """Words after ``pip install``, quoted for a shell, that give a Python all that the trainer needs.

    They name this llmctl with its extra ``train``, from where it was installed; the packages if that is unknown.

    Args:
        elsewhere: the Python is on another machine, which has no files of this one.
    """
    requirement = None if elsewhere else _requirement()
    return " ".join(TRAINER_PACKAGES) if requirement is None else requirement


def _requirement() -> str | None:
    """This llmctl with its extra, as pip takes it; None if its origin is unknown or gone."""
    if (PACKAGE.parent / "pyproject.toml").is_file():
        return _quoted(f"{PACKAGE.parent}[train]")
    # Only messages need the metadata, which takes long to import and to find.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(NAME)
    except PackageNotFoundError:
        return None
    if Path(str(found.locate_file("llmctl"))).resolve() != PACKAGE:
        return None
    origin = found.read_text("direct_url.json")
    return _quoted(f"{NAME}[train]=={found.version}") if origin is None else requirement_of(json.loads(origin))


def requirement_of(origin: dict[str, Any]) -> str | None:
    """The requirement for an origin that pip recorded; None for a file or folder that is gone, or has an escaped name.

    By https://packaging.python.org/en/latest/specifications/direct-url/.
    """
    url = str(origin["url"])
    if "vcs_info" in origin:
        return _quoted(f"{NAME}[train] @ {origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}")
    if not url.startswith("file:"):
        return _quoted(f"{NAME}[train] @ {url}")
    path = url.removeprefix("file://")
    return _quoted(f"{path}[train]") if Path(path).exists() else None


def _quoted(requirement: str) -> str:
    # The brackets are a pattern of file names to a shell.
    return shlex.quote(requirement)
