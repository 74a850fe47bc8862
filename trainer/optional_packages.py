"""Packages that are not needed but may stand in the way: looked at without importing them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path


def unrelated_apex(search_path: Sequence[str] | None = None) -> str | None:
    """A sentence with the cure if the ``apex`` that Python would import is not NVIDIA's; else None.

    ``pip install apex`` gets a toolkit for the Pyramid web framework, whose last version is 0.9.10dev; NVIDIA's is not
    on the index (https://github.com/NVIDIA/apex, "Installation"). They are told apart by ``apex/optimizers``, a folder
    that only NVIDIA's has, so that neither has to be run.

    Args:
        search_path: folders in the place of sys.path.
    """
    found = PathFinder.find_spec("apex", None if search_path is None else list(search_path))
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    if not folders or any((Path(folder) / "optimizers").is_dir() for folder in folders):
        return None
    return (
        f"the package apex in {Path(folders[0]).parent} is not NVIDIA's but a web toolkit of the same name; remove it: "
        "python -m pip uninstall apex (nothing here needs apex; NVIDIA's is installed from its source alone)"
    )
