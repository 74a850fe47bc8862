"""The steps of an environment as shell scripts, each with the inputs on which its result depends. Pure."""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

RECORD = "llmctl-env.json"
"""File in the environment's folder: its finished steps."""
_OLD = "llmctl: this Python is %d.%d; the environment needs 3.10 or later"
_CHECK_AGE = f'import sys; sys.version_info >= (3, 10) or sys.exit("{_OLD}" % sys.version_info[:2])'
_SHOW_TORCH = 'import torch; print("torch", torch.__version__, "for CUDA", torch.version.cuda)'


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: of the step.
        lines: shell lines, quoted; the first that fails ends the step.
        inputs: all that the result depends on, besides the steps before.
        in_job: True for a step that compiles: on a node of the cluster, if it has a queue.
        present: shell lines that succeed if the result is there already; empty for steps without such a result.
    """

    name: str
    lines: Sequence[str]
    inputs: Mapping[str, object] = field(default_factory=dict)
    in_job: bool = False
    present: Sequence[str] = ()


@dataclass(frozen=True)
class Wanted:
    """An environment, with every value decided. Paths are those of the cluster's machine, absolute.

    Attributes:
        path: folder of the virtual environment.
        python: interpreter that makes it.
        modules: modules and shell lines of the profile, which are loaded before each step.
        torch: requirement, as ``torch==2.11.0``.
        torch_index: index of torch's wheels; None for pip's own index.
        find_links: folder of wheels in place of every index; None for indexes.
        llmctl: words for pip that name llmctl with its extra for training, or its packages.
        own: the user's own folder beside the runs: sources and wheels.
        architectures: compute capabilities of the nodes' GPUs, in order; empty if unknown, or without NVIDIA's GPUs.
        node_size: cores and memory in GiB of a node that compiles; 0 if unknown.
    """

    path: str
    python: str
    modules: Sequence[str]
    torch: str
    torch_index: str | None
    find_links: str | None
    llmctl: Sequence[str]
    own: str
    architectures: Sequence[str] = ()
    node_size: tuple[float, float] = (0, 0)

    @property
    def own_python(self) -> str:
        """The interpreter of the environment."""
        return f"{self.path}/bin/python"

    def pip(self, *words: str, index: str | None = None) -> str:
        """Shell line of a pip command of the environment; packages come from ``index``, or the folder of wheels."""
        source = ["--index-url", index] if index is not None else []
        if self.find_links is not None:
            source = [*(source or ["--no-index"]), "--find-links", self.find_links]
        command, *rest = words
        return shlex.join([self.own_python, "-m", "pip", command, *source, *rest])


def plan_steps(wanted: Wanted) -> list[Step]:
    """The steps of an environment, in order."""
    path, record = shlex.quote(wanted.path), shlex.quote(RECORD)
    made = {"python": wanted.python, "modules": list(wanted.modules)}
    sources = {"index": wanted.torch_index, "find_links": wanted.find_links}
    return [
        Step(
            "venv",
            [
                shlex.join([wanted.python, "-c", _CHECK_AGE]),
                # Packages of another Python must not stay. Only a folder with our record gets here.
                f"find {path} -mindepth 1 -maxdepth 1 ! -name {record} -exec rm -rf {{}} +",
                shlex.join([wanted.python, "-m", "venv", wanted.path]),
            ],
            made,
        ),
        Step(
            "torch",
            [
                wanted.pip("install", wanted.torch, index=wanted.torch_index),
                shlex.join([wanted.own_python, "-c", _SHOW_TORCH]),
            ],
            {"torch": wanted.torch, **sources},
        ),
        Step("llmctl", [wanted.pip("install", *wanted.llmctl)], {"words": list(wanted.llmctl)}),
    ]


def keys_of(steps: Sequence[Step]) -> list[str]:
    """A digest of each step's inputs and of those of the steps before: a changed input changes all that follow."""
    keys, before = [], ""
    for step in steps:
        text = json.dumps([before, step.name, step.inputs], sort_keys=True)
        before = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        keys.append(before)
    return keys
