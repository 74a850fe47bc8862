"""Location of csrc/: beside the package in checkouts and snapshots, bundled in wheels."""

from __future__ import annotations

from pathlib import Path

from trainer.ops.build.build_settings import BuildError

_SUFFIXES = (".h", ".cpp", ".cu")


def source_folder() -> Path:
    """The folder csrc.

    Raises:
        BuildError: the folder is missing.
    """
    beside = Path(__file__).parents[3]
    for folder in (beside / "csrc", beside / "llmctl" / "_bundled" / "csrc"):
        if folder.is_dir():
            return folder
    raise BuildError(f"csrc was not found beside {beside / 'trainer'}; the installation is incomplete")


def source_files() -> list[Path]:
    """All files that a build reads, in a fixed order."""
    return sorted(path for path in source_folder().rglob("*") if path.suffix in _SUFFIXES)


def op_files(name: str) -> list[Path]:
    """Files of one name, such as ``cpu.cpp``, in all operations' folders, in fixed order."""
    return sorted(source_folder().rglob(name))
