"""Scripts of a folder that start a training program, and Megatron-LM's tests that list a program's flags."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".sh", ".slurm", ".pbs", ".job", ".sbatch")
KNOWN = ("pretrain_gpt", "pretrain_bert", "pretrain_t5")
_PROGRAM = re.compile(r"^[^#\n]*?\b(pretrain\w*)\.py", re.MULTILINE)
_HAS_FLAGS = re.compile(r"^MODEL_ARGS:\s+[\"']?--\w", re.MULTILINE)
_PROGRAM_OF = {"moe": "gpt", "mixtral": "gpt"}
_LARGEST = 1_000_000


@dataclass(frozen=True)
class Published:
    """A distinct script or test.

    Attributes:
        source: OWNER/NAME of the first repository that has the text.
        path: of the file.
        programs: names such as pretrain_gpt, without ending; of a functional test, by the folder of its model.
    """

    source: str
    path: Path
    programs: frozenset[str]

    @property
    def is_known(self) -> bool:
        """True if the text names a program that the trainer has."""
        return not self.programs.isdisjoint(KNOWN)


def commits_of(folder: Path) -> dict[str, list[str]]:
    """OWNER/NAME -> its branches with their commits, of every repository in the folder."""
    return {
        _name(one): (one / "commits").read_text(encoding="utf-8").splitlines() if (one / "commits").is_file() else []
        for one in sorted(folder.iterdir())
        if one.is_dir()
    }


def scripts_of(folder: Path) -> list[Published]:
    """The distinct scripts that name a training program outside their comments."""
    return list(_distinct(folder, SUFFIXES))


def model_configs_of(folder: Path) -> list[Published]:
    """The distinct files ``model_config.yaml`` of functional tests."""
    return list(_distinct(folder, ("model_config.yaml",)))


def _distinct(folder: Path, endings: tuple[str, ...]) -> Iterator[Published]:
    seen = set()
    for source in sorted(one for one in folder.iterdir() if one.is_dir()):
        for path in sorted(source.rglob("*")):
            if not path.name.endswith(endings) or not path.is_file() or path.stat().st_size > _LARGEST:
                continue
            data = path.read_bytes()
            text = data.decode("utf-8", errors="replace")
            is_test = path.suffix == ".yaml"
            programs = _programs_of_test(path, text) if is_test else frozenset(_PROGRAM.findall(text))
            mark = hashlib.sha256(data).digest()
            if mark in seen or not programs:
                continue
            seen.add(mark)
            yield Published(_name(source), path, programs)


def _programs_of_test(path: Path, text: str) -> frozenset[str]:
    if not _HAS_FLAGS.search(text):
        return frozenset()
    model = path.parent.parent.name
    is_inference = "inference" in path.parent.name or "--max-tokens-to-oom" in text
    return frozenset((f"pretrain_{_PROGRAM_OF.get(model, model)}" if not is_inference else "inference",))


def _name(source: Path) -> str:
    return source.name.replace("+", "/", 1)
