"""Checks of the jobs' Python, its torch, and the GPUs of torch's build. Pure."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmctl.doctor.probes import Gpu, Section
from llmctl.doctor.torch_wheels import ARCHITECTURES, OLDEST_DRIVER, choose_index, is_amd
from llmctl.site.profile import ClusterProfile
from llmctl.submit.execute import NODE_PYTHON_REMEDY

_OLDEST_PYTHON = (3, 10)
_NEEDED = ("numpy", "pydantic", "pyyaml")
_USEFUL = ("safetensors", "tokenizers")


CheckState = Literal["ok", "note", "warning", "FAULT"]


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        name: subject of the check.
        state: of the finding; note: not testable here, or not required here.
        detail: the finding.
        remedy: the remedy, as a command or step; empty without a problem.
        exit_code: class of a fault: 3 profile, 4 scheduler or connection.
        cure: the remedy as a command that ``doctor --fix`` can run: it adds something, and removes or changes nothing.
            ``llmctl`` is this one; other programs run on the cluster's machine. Empty: the remedy is the user's.
    """

    name: str
    state: CheckState
    detail: str
    remedy: str = ""
    exit_code: int = 3
    cure: tuple[str, ...] = ()


def judge_python(facts: dict[str, Any], wanted_gpu: str | None) -> list[Check]:
    """Check version, packages, torch and its build, in order; checks that need a missing part are left out.

    Args:
        facts: output of PYTHON_PROGRAM.
        wanted_gpu: the GPU of the jobs' nodes, under the profile's name; None on CPUs.
    """
    version = tuple(facts["version"])
    shown = ".".join(str(part) for part in version)
    python = facts["executable"]
    if version < _OLDEST_PYTHON:
        remedy = (
            "make an environment with Python 3.10 or later: `module avail python`, `conda create -p DIR python=3.12`, "
            "or `uv venv --python 3.12 DIR`"
        )
        return [Check("python", "FAULT", f"{shown} at {python} is too old", remedy)]
    checks = [Check("python", "ok", f"{shown} at {python}"), *_packages(facts)]
    if "torch" not in facts:
        error = facts.get("torch_error", "it cannot be imported")
        what = f"{python} has no torch" if error == "No module named 'torch'" else f"torch cannot be imported: {error}"
        cure = (python, "-m", "pip", "install", "torch", *_wheels(wanted_gpu).split())
        # A torch that is there and cannot be imported is for the user to replace.
        is_absent = error == "No module named 'torch'"
        return [*checks, Check("torch", "FAULT", what, shlex.join(cure), cure=cure if is_absent else ())]
    build = f"CUDA {facts['cuda']}" if facts.get("cuda") else f"ROCm {facts['hip']}" if facts.get("hip") else "CPU only"
    checks.append(Check("torch", "ok", f"{facts['torch']}, {build}, imported in {facts['import_s']:g} s"))
    if wanted_gpu is not None:
        checks.append(_build(facts, wanted_gpu))
    return checks


def _packages(facts: dict[str, Any]) -> list[Check]:
    python = facts["executable"]
    found = facts["packages"]
    checks = []
    states: tuple[tuple[tuple[str, ...], CheckState], ...] = ((_NEEDED, "FAULT"), (_USEFUL, "warning"))
    for names, state in states:
        missing = [name for name in names if name not in found]
        if missing:
            cure = (python, "-m", "pip", "install", *missing)
            checks.append(Check("packages", state, f"{', '.join(missing)} not installed", shlex.join(cure), cure=cure))
    if not checks:
        checks.append(Check("packages", "ok", ", ".join(f"{name} {version}" for name, version in found.items())))
    if "unrelated_apex" in facts:
        what = f"{facts['unrelated_apex']} is not NVIDIA's apex but a web toolkit of the same name"
        remedy = f"{python} -m pip uninstall apex   # llmctl needs no apex"
        checks.append(Check("apex", "FAULT", what, remedy))
    return checks


def _wheels(gpu: str | None) -> str:
    """Option of pip for the index with a GPU's torch; empty if the Python index has it, which is for CUDA 13."""
    level = ARCHITECTURES.get(gpu or "")
    index = choose_index({str(gpu): level}, driver=OLDEST_DRIVER["13"]) if level is not None else None
    return "" if index is None or index.url.endswith("cu130") else f" --index-url {index.url}"


def _build(facts: dict[str, Any], gpu: str) -> Check:
    """Check that torch was built for the nodes' GPU."""
    maker = "hip" if is_amd(gpu) else "cuda"
    reinstall = f"{facts['executable']} -m pip install --force-reinstall torch{_wheels(gpu)}"
    if not facts.get(maker):
        kind = "for ROCm" if maker == "hip" else "for CUDA"
        detail = f"torch {facts['torch']} is not built {kind}, but the nodes have {gpu}"
        return Check("torch build", "FAULT", detail, reinstall)
    architecture = ARCHITECTURES.get(gpu)
    built_for = facts.get("built_for") or []
    if architecture is None or not built_for:
        return Check("torch build", "note", f"unknown whether torch runs on {gpu}")
    if runs_on(built_for, architecture):
        return Check("torch build", "ok", f"runs on {gpu} ({architecture})")
    detail = f"torch is built for {' '.join(built_for)}, none of which runs on {gpu} ({architecture})"
    return Check("torch build", "FAULT", detail, reinstall)


def runs_on(built_for: Sequence[str], architecture: str) -> bool:
    """True if a program with these architectures runs on a GPU.

    Machine code (sm_XY) runs on the same major version from its minor version on. Code for a virtual machine
    (compute_XY) runs on every later version. AMD's code runs only on the named architecture. CUDA C++ Programming
    Guide, "Binary Compatibility" and "PTX Compatibility".
    """
    if architecture.startswith("gfx"):
        return any(entry.partition(":")[0] == architecture for entry in built_for)
    major, minor = (int(part) for part in architecture.split("."))
    for entry in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", entry)
        if match is None:
            continue
        other, least = int(match[2]), int(match[3])
        if match[4]:
            fits = (other, least) == (major, minor)
        elif match[1] == "sm":
            fits = other == major and least <= minor
        else:
            fits = (other, least) <= (major, minor)
        if fits:
            return True
    return False


def judge_driver(gpus: Sequence[Gpu], facts: dict[str, Any] | None, *, expected: bool) -> Check:
    """Check this node's driver against torch's CUDA.

    Args:
        gpus: GPUs listed by nvidia-smi on this node.
        facts: output of PYTHON_PROGRAM; None if there is no such Python.
        expected: True if jobs run on this machine.
    """
    if not gpus:
        where = "this machine has no NVIDIA GPU" if expected else "this node has no NVIDIA GPU; compute nodes may"
        return Check("driver", "note", where)
    shown = f"{gpus[0].driver}, {len(gpus)} x {gpus[0].name}"
    cuda = (facts or {}).get("cuda")
    oldest = OLDEST_DRIVER.get(str(cuda).partition(".")[0])
    if oldest is None or _numbers(gpus[0].driver) >= _numbers(oldest):
        return Check("driver", "ok", shown)
    remedy = (
        f"install a torch for an older CUDA (https://pytorch.org/get-started/previous-versions/), or driver {oldest}"
    )
    return Check("driver", "FAULT", f"{shown}: too old for torch's CUDA {cuda}, which needs {oldest}", remedy)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def judge_node_python(profile: ClusterProfile, section: Section) -> Check:
    """The line of ``llmctl doctor`` on the supervisor's Python.

    Args:
        profile: of the cluster.
        section: the answer to FIND_NODE_PYTHON.
    """
    if section.status == 0:
        return Check("supervisor", "ok", f"runs with {section.text.strip()}, if nodes have the same as this one")
    if profile.environment.kind == "container":
        return Check(
            "supervisor", "warning", "no python3 of version 3.6 or later outside of the image", NODE_PYTHON_REMEDY
        )
    return Check("supervisor", "note", "no python3 of version 3.6 or later: jobs take that of the environment")
