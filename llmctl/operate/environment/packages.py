"""Packages that are compiled from source for an environment: recipes, and the words of ``--with``. Pure.

Sources of the recipes:
    [APEX] https://github.com/NVIDIA/apex, "From Source": APEX_CPP_EXT=1 APEX_CUDA_EXT=1, --no-build-isolation
    [FA]   https://github.com/Dao-AILab/flash-attention, "Installation", and its setup.py: FLASH_ATTENTION_FORCE_BUILD,
           FLASH_ATTN_CUDA_ARCHS, MAX_JOBS; 9 GB for each compiler with 4 threads; GPUs from Ampere on
    [TE]   https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/installation.html: branch stable,
           NVTE_FRAMEWORK=pytorch, NVTE_CUDA_ARCHS; GPUs from Ampere on
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from llmctl.errors import UsageError

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


@dataclass(frozen=True)
class Recipe:
    """Ways of one package.

    Attributes:
        url: its git repository.
        ref: branch or tag; empty for the default branch.
        variables: environment of its build.
        architectures: variable that takes the GPUs' architectures, besides torch's own TORCH_CUDA_ARCH_LIST.
        tools: packages that build it.
        oldest: compute capability of the oldest GPU.
        gib_per_job: memory of one compiler.
    """

    url: str
    ref: str
    variables: Sequence[str]
    architectures: str | None
    tools: Sequence[str]
    oldest: tuple[int, int]
    gib_per_job: int


RECIPES = {
    "apex": Recipe(
        "https://github.com/NVIDIA/apex", "", ("APEX_CPP_EXT=1", "APEX_CUDA_EXT=1"),
        None, ("wheel", "packaging", "ninja"), (7, 0), 4,
    ),
    "flash-attn": Recipe(
        "https://github.com/Dao-AILab/flash-attention", "v2.8.3", ("FLASH_ATTENTION_FORCE_BUILD=TRUE",),
        "FLASH_ATTN_CUDA_ARCHS", ("wheel", "packaging", "ninja", "psutil", "einops"), (8, 0), 9,
    ),
    "transformer-engine": Recipe(
        "https://github.com/NVIDIA/TransformerEngine", "stable", ("NVTE_FRAMEWORK=pytorch",),
        "NVTE_CUDA_ARCHS", ("wheel", "packaging", "ninja", "cmake", "pybind11"), (8, 0), 9,
    ),
}  # fmt: skip
_OTHER = Recipe("", "", (), None, (), (0, 0), 4)


@dataclass(frozen=True)
class Package:
    """One package of ``--with``.

    Attributes:
        name: for people and folders.
        recipe: its recipe; that of an own sdist is empty.
        ref: branch, tag or commit of the recipe's repository; empty for the default branch.
        path: sdist or wheel on the cluster's machine, absolute; None for the repository.
        digest: sha256 of the file at ``path``; empty for the repository.
    """

    name: str
    recipe: Recipe
    ref: str = ""
    path: str | None = None
    digest: str = ""

    @property
    def is_wheel(self) -> bool:
        """True if nothing is to be compiled."""
        return (self.path or "").endswith(".whl")


def parse_package(word: str) -> Package:
    """Parse one word of ``--with``: ``NAME``, ``NAME@REF``, ``NAME=FILE`` or ``FILE``.

    Raises:
        UsageError: no recipe has this name, and it is not the path of an sdist or wheel.
    """
    name, is_file, path = word.partition("=")
    if not is_file and "/" in word.partition("@")[0]:
        name, path = "", word
    if path:
        file = PurePosixPath(path).name
        if not file.endswith((".tar.gz", ".zip", ".whl")):
            raise UsageError(f"--with {word}: {path} is neither an sdist (.tar.gz, .zip) nor a wheel (.whl)")
        stem = re.split(r"-\d", file)[0]
        return Package(name or stem, RECIPES.get((name or stem).replace("_", "-"), _OTHER), path=path)
    name, _, ref = word.partition("@")
    if name not in RECIPES:
        raise UsageError(
            f"--with {word}: known are {', '.join(RECIPES)}, each with @TAG; or the path of an sdist or wheel"
        )
    if ref and not _REF.fullmatch(ref):
        raise UsageError(f"--with {word}: {ref} is not the name of a branch, tag or commit")
    return Package(name, RECIPES[name], ref or RECIPES[name].ref)
