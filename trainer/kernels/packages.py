"""Packages that are not needed but may be installed, or stand in the way: apex, flash-attn, transformer-engine.

They are looked at without importing them: one that was built for another torch or CUDA can end the process. What is
installed is tried in a process of its own. What its files say may be anything. Torch-free.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from trainer.kernels.installed import MOST_READ, Distribution, find_distribution, normalized

LIMIT_S = 120.0
"""For trying one package: an import of torch from a busy network file system takes tens of seconds."""
_ENDING_S = 10.0
_DONE = 86
"""Exit code of a trial that came to its end. A package may end the process itself, and call that success."""

_NOT_NEEDED = "nothing here needs it"
_ON_CUDA = "import torch\nif torch.cuda.is_available():\n    "
_ATTENTION = (
    "q = torch.zeros(1, 16, 1, 64, dtype=torch.float16, device='cuda')\n    {function}(q, q, q)\n"
    "    torch.cuda.synchronize()\n"
)


@dataclass(frozen=True)
class Surroundings:
    """What a package has to fit.

    Attributes:
        torch: its version.
        cuda: the CUDA that torch was built for, such as "12.8"; None: it is for CPUs.
        cxx11_abi: whether torch was built with the newer ABI of libstdc++.
        capability: the lowest compute capability of the GPUs here; None: there is none.
        nvcc: version of the CUDA compiler that is found; None: there is none.
    """

    torch: str
    cuda: str | None
    cxx11_abi: bool = True
    capability: tuple[int, int] | None = None
    nvcc: tuple[int, int] | None = None

    @property
    def torch_minor(self) -> str:
        """Major and minor version of torch: extensions of one do not load in another."""
        return ".".join(self.torch.split(".")[:2])


@dataclass(frozen=True)
class PackageState:
    """What was found of one package.

    Attributes:
        name: of the package.
        verdict: whether it is not there, works, or does not.
        sentence: what was found or is wrong, and the command that mends it.
    """

    name: str
    verdict: Literal["absent", "ok", "broken"]
    sentence: str


@dataclass(frozen=True)
class _Package:
    """One package: how it is recognised and tried.

    Attributes:
        name: on the index, or of the repository.
        module: its top-level module.
        distributions: names under which it may have been installed.
        program: Python that uses it, on a GPU if there is one.
        extensions: compiled modules that it is of no use without.
        capability: the lowest of the GPUs that it is for.
        cure: the command that installs it so that it fits.
    """

    name: str
    module: str
    distributions: tuple[str, ...]
    program: str
    extensions: tuple[str, ...]
    capability: tuple[int, int]
    cure: Callable[[Surroundings], str]


def unrelated_apex(search_path: Sequence[str] | None = None) -> str | None:
    """A sentence with the cure if the ``apex`` that Python would import is not NVIDIA's; else None.

    ``pip install apex`` gets a toolkit for the Pyramid web framework, whose last version is 0.9.10dev; NVIDIA's is not
    on the index (https://github.com/NVIDIA/apex, "Installation"). They are told apart by ``apex/optimizers``, a folder
    that only NVIDIA's has, so that neither has to be run.

    Args:
        search_path: folders in the place of sys.path.
    """
    folders = _folders("apex", search_path)
    if not folders or any((Path(folder) / "optimizers").is_dir() for folder in folders):
        return None
    return _on_one_line(
        f"the package apex in {Path(folders[0]).parent} is not NVIDIA's but a web toolkit of the same name; remove it: "
        "python -m pip uninstall apex (nothing here needs apex; NVIDIA's is installed from its source alone)"
    )


def examine_packages(
    surroundings: Surroundings, search_path: Sequence[str] | None = None, limit_s: float = LIMIT_S
) -> tuple[PackageState, ...]:
    """What is to be said about each package.

    Args:
        surroundings: what they have to fit.
        search_path: folders in the place of sys.path.
        limit_s: for trying each that is installed.
    """
    path = list(sys.path if search_path is None else search_path)
    return tuple(_examine(package, surroundings, path, limit_s) for package in _PACKAGES)


def use_problem(program: str, surroundings: Surroundings, limit_s: float = LIMIT_S) -> str | None:
    """Why a program that uses a package does not end well here; None if it does.

    Found out in a process of its own, which may crash or hang.

    Args:
        program: Python that uses it.
        surroundings: what the package has to fit.
        limit_s: for trying it.
    """
    problem = _trial_problem(program, surroundings, sys.path, limit_s)
    return None if problem is None else _on_one_line(problem)


def _examine(package: _Package, surroundings: Surroundings, path: list[str], limit_s: float) -> PackageState:
    looked_for = (find_distribution(name, path) for name in package.distributions)
    found = [known for known in looked_for if known is not None]
    versions = [f"{known.name} {known.version}" for known in found]
    if not versions and PathFinder.find_spec(package.module, path) is None:
        return PackageState(package.name, "absent", f"not installed; {_NOT_NEEDED}")
    what = ", ".join(versions) or package.name
    problem = _problem(package, surroundings, path, found, limit_s)
    if problem is None:
        sentence = f"{what} works with torch {surroundings.torch}; {_NOT_NEEDED}"
        return PackageState(package.name, "ok", _on_one_line(sentence))
    cure = _cure(package, surroundings, path)
    sentence = f"{what}: {problem}; {_NOT_NEEDED}; to mend it: {cure}"
    return PackageState(package.name, "broken", _on_one_line(sentence))


def _on_one_line(text: str) -> str:
    """The same without what a terminal would act on: ends of lines, escapes, and whatever else cannot be printed."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _cure(package: _Package, surroundings: Surroundings, path: list[str]) -> str:
    remove = f"python -m pip uninstall {package.distributions[0]}"
    if surroundings.cuda is None:
        return remove
    if _too_old(package, surroundings):
        return f"{remove}; torch's own operations run on this GPU"
    if package.name == "apex" and unrelated_apex(path) is not None:
        return f"{remove}; and for NVIDIA's, if you want it: {package.cure(surroundings)}"
    return package.cure(surroundings)


def _problem(
    package: _Package, surroundings: Surroundings, path: list[str], found: Sequence[Distribution], limit_s: float
) -> str | None:
    """What is wrong with a package that is there, cheapest to find out first."""
    if package.name == "apex" and unrelated_apex(path) is not None:
        where = Path(_folders("apex", path)[0]).parent
        return f"the package in {where} is not NVIDIA's but a web toolkit of the same name"
    if surroundings.cuda is None:
        return f"it is for GPUs, and torch {surroundings.torch} is for CPUs alone"
    if _too_old(package, surroundings):
        least, here = (".".join(map(str, number)) for number in (package.capability, surroundings.capability or ()))
        return f"it is for GPUs of compute capability {least} and up, and one here has {here}"
    if package.module == "transformer_engine":
        problem = _halves_problem(found, path)
    else:
        problem = _extensions_problem(package, path)
    problem = problem or next(filter(None, (_tag_problem(known, surroundings) for known in found)), None)
    return problem or _trial_problem(package.program, surroundings, path, limit_s)


def _too_old(package: _Package, surroundings: Surroundings) -> bool:
    return surroundings.capability is not None and surroundings.capability < package.capability


def _folders(module: str, search_path: Sequence[str] | None) -> list[str]:
    found = PathFinder.find_spec(module, None if search_path is None else list(search_path))
    return list(found.submodule_search_locations or ()) if found is not None else []


def _extensions_problem(package: _Package, path: list[str]) -> str | None:
    missing = [name for name in package.extensions if PathFinder.find_spec(name, path) is None]
    if not missing:
        return None
    for folder in path:
        for library in sorted(Path(folder or ".").glob(f"{missing[0]}.*.so")):
            return f"{library.name} is for another Python than {sys.version_info[0]}.{sys.version_info[1]}"
    return f"it was built without its compiled {'parts' if len(missing) > 1 else 'part'} {', '.join(missing)}"


def _halves_problem(found: Sequence[Distribution], path: list[str]) -> str | None:
    """Transformer Engine is three packages of one version, or one that was built from source."""
    by_name = {normalized(known.name): known.version for known in found}
    places = [Path(folder or ".") for folder in path]
    inside = [Path(folder) for folder in _folders("transformer_engine", path)]
    inside += [folder / "wheel_lib" for folder in inside]
    if not any(list(folder.glob("transformer_engine_torch*.so")) for folder in (*places, *inside)):
        return "its half for torch, transformer_engine_torch, is not there"
    if len(set(by_name.values())) > 1:
        return f"its parts are of different versions ({', '.join(f'{n} {v}' for n, v in by_name.items())})"
    return None


def _tag_problem(found: Distribution, surroundings: Surroundings) -> str | None:
    """What the name of a prebuilt wheel says, which its version or the address that it came from has kept."""
    said = f"{found.version} {found.origin}"
    tag = re.search(r"cu(\d{1,4})torch(\d{1,3}\.\d{1,3})(?:cxx11abi(true|false))?", said, re.IGNORECASE)
    if tag is None:
        return None
    assert surroundings.cuda is not None
    major = surroundings.cuda.split(".")[0]
    if tag[2] != surroundings.torch_minor:
        return f"it was built for torch {tag[2]}, and this is {surroundings.torch}"
    if not tag[1].startswith(major):
        return f"it was built for CUDA {tag[1]}, and this torch for CUDA {surroundings.cuda}"
    if tag[3] is not None and (tag[3].lower() == "true") != surroundings.cxx11_abi:
        return f"it was built with another C++ ABI than this torch, whose cxx11abi is {surroundings.cxx11_abi}"
    return None


def _trial_problem(program: str, surroundings: Surroundings, path: list[str], limit_s: float) -> str | None:
    """What happens when a package is used by a program, in a process that is ended after ``limit_s``."""
    program = f"import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n{program}\nsys.exit({_DONE})"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"using it took longer than {limit_s:.0f} s"
        finally:
            # With all that it has started, such as a compiler.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                # One that hangs in a driver is not even ended by that.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)
        said.seek(max(0, said.seek(0, os.SEEK_END) - MOST_READ))
        lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    if code == _DONE:
        return None
    if code < 0:
        return f"using it ended in {signal.Signals(-code).name}"
    return _explained(lines[-1][:300] if lines else f"using it ended with exit code {code}", surroundings)


def _explained(line: str, surroundings: Surroundings) -> str:
    """The last line of a failure, with what it means where that is known."""
    library = re.search(r"(lib\w+)\.so[.\d]*: cannot open shared object file", line)
    if "undefined symbol" in line:
        meaning = f"it was built for another torch than {surroundings.torch}"
    elif "cudnn" in line.lower():
        meaning = "cuDNN is not found"
    elif library is not None:
        meaning = f"{library[0].split(':')[0]} is not found: it was built for another CUDA than {surroundings.cuda}"
    elif line.startswith("StopIteration"):
        meaning = "its half for torch does not fit"
    elif "busy or unavailable" in line:
        meaning = "the GPU lets one process in at a time, and another one is using it"
    elif "no kernel image" in line:
        meaning = "it was not compiled for the GPUs here"
    elif "GLIBC" in line and "not found" in line:
        meaning = "it was built on a newer Linux"
    else:
        return f"using it fails: {line}"
    return f"{meaning} ({line})"


def _build_apex(surroundings: Surroundings) -> str:
    assert surroundings.cuda is not None
    command = (
        "git clone https://github.com/NVIDIA/apex && cd apex && "
        "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 python -m pip install --no-build-isolation ."
    )
    nvcc = surroundings.nvcc
    if nvcc is None:
        return f"{command} (with the nvcc of CUDA {surroundings.cuda}, which was not found here)"
    if f"{nvcc[0]}.{nvcc[1]}" != surroundings.cuda:
        return f"{command} (which refuses nvcc {nvcc[0]}.{nvcc[1]}: set CUDA_HOME to a CUDA {surroundings.cuda})"
    return command


def _install_flash_attention(surroundings: Surroundings) -> str:
    assert surroundings.cuda is not None
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    tag = (
        f"cu{surroundings.cuda.split('.')[0]}torch{surroundings.torch_minor}"
        f"cxx11abi{str(surroundings.cxx11_abi).upper()}-{python}-{python}"
    )
    return (
        "MAX_JOBS=4 python -m pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation flash-attn "
        f"(quick if https://github.com/Dao-AILab/flash-attention/releases has a wheel for {tag}, and else hours)"
    )


def _build_flash_attention_3(_: Surroundings) -> str:
    return (
        "git clone --recursive https://github.com/Dao-AILab/flash-attention && cd flash-attention/hopper && "
        "MAX_JOBS=4 python -m pip install --no-build-isolation ."
    )


def _install_transformer_engine(surroundings: Surroundings) -> str:
    assert surroundings.cuda is not None
    major = surroundings.cuda.split(".")[0]
    return (
        "python -m pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation "
        f"transformer-engine transformer-engine-cu{major} transformer-engine-torch"
    )


_PACKAGES = (
    _Package(
        "apex",
        "apex",
        ("apex",),
        "import torch, amp_C, fused_layer_norm_cuda\nimport apex.normalization\n"
        f"{_ON_CUDA}apex.normalization.FusedLayerNorm(64).cuda()(torch.zeros(2, 64, device='cuda')).sum().item()\n",
        ("amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"),
        (7, 0),
        _build_apex,
    ),
    _Package(
        "flash-attn",
        "flash_attn",
        ("flash-attn",),
        "import torch\nfrom flash_attn import flash_attn_func\n"
        + _ON_CUDA
        + _ATTENTION.format(function="flash_attn_func"),
        ("flash_attn_2_cuda",),
        (8, 0),
        _install_flash_attention,
    ),
    _Package(
        "flash-attn 3",
        "flash_attn_interface",
        ("flash-attn-3",),
        "import torch\nfrom flash_attn_interface import flash_attn_func\n"
        + _ON_CUDA
        + _ATTENTION.format(function="flash_attn_func"),
        ("flash_attn_interface",),
        (8, 0),
        _build_flash_attention_3,
    ),
    _Package(
        "transformer-engine",
        "transformer_engine",
        (
            "transformer-engine",
            "transformer-engine-cu12",
            "transformer-engine-cu13",
            "transformer-engine-torch",
        ),
        "import torch\nimport transformer_engine.pytorch as engine\n"
        f"{_ON_CUDA}engine.Linear(64, 64).cuda()(torch.zeros(16, 64, device='cuda')).sum().item()\n",
        (),
        (7, 0),
        _install_transformer_engine,
    ),
)
