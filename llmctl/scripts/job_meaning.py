"""Directives, launchers and exported variables of a script as the job section of a config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmctl.scripts.directives import JOB_FOLDER, JobWord
from llmctl.scripts.launch_line import LaunchLine
from llmctl.scripts.launch_words import NODES, RANKS, RANKS_PER_NODE
from llmctl.scripts.outside import JobSize
from llmctl.scripts.shell.values import Value, missing_of, text_of
from trainer.config.paths.variables import may_be_secret

_KEPT = re.compile(
    r"(NCCL|RCCL|CUDA|TORCH|TORCHINDUCTOR|PYTORCH|OMP|MKL|KMP|UCX|FI|GLOO|NVTE|TRITON|TOKENIZERS|HSA|MIOPEN|GPU|HF|WANDB|"
    r"NVSHMEM|MPICH|PALS|OMPI_MCA)_\w+|PYTHON(UNBUFFERED|FAULTHANDLER|HASHSEED)"
)
_NOT_KEPT = re.compile(r"CUDA_(HOME|PATH|ROOT\w*|VISIBLE_DEVICES)|\w*_(HOME|DIR|CACHE)")
_TOLD_BY_LAUNCHER = frozenset(
    ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "NNODES", "PATH", "LD_LIBRARY_PATH")
)


@dataclass
class JobMeaning:
    """The job section.

    Attributes:
        values: key of the section -> value.
        origins: key, or ``env.NAME``, -> words and line.
        without_effect: line, words and reason.
        remarks: those of them that change what runs, and what is read in another way.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    without_effect: list[tuple[int, str, str]] = field(default_factory=list)
    remarks: list[tuple[int, str, str]] = field(default_factory=list)

    def put(self, key: str, value: Any, text: str, line: int) -> None:
        """Set a key; mounts and variables are added to those before."""
        if key == "mounts":
            value = [*self.values.get(key, []), *value]
        elif key == "env":
            self.origins.update({f"env.{name}": _origin(text, line) for name in value})
            value = {**self.values.get(key, {}), **value}
        self.values[key] = value
        self.origins[key] = _origin(text, line)


def size_of(directives: Sequence[JobWord]) -> JobSize:
    """The size of the job that directives ask for; ranks of a node count as its GPUs."""
    found = {word.key: word.value for word in directives if word.key}
    ranks = next((word.value for word in directives if word.value is not None and not word.key), None)
    gpus = found.get("gpus_per_node", ranks)
    return JobSize(found.get("nodes"), gpus if isinstance(gpus, int) else None)


def job_meaning(directives: Sequence[JobWord], launch: LaunchLine, environment: Mapping[str, Value]) -> JobMeaning:
    """The job section: directives first, then the launch line, which knows better."""
    job = JobMeaning()
    for word in [*directives, *launch.words]:
        if word.key == JOB_FOLDER:
            continue
        if word.key:
            job.put(word.key, word.value, word.text, word.line)
        else:
            told = job.remarks if word.is_told else job.without_effect
            told.append((word.line, word.text, word.reason))
    _put_sizes(launch, job)
    _put_environment({**environment, **launch.environment}, launch.line, job)
    return job


def _put_sizes(launch: LaunchLine, job: JobMeaning) -> None:
    sizes = {name: (int(text) if text else None, line, shown) for name, (text, line, shown) in launch.sizes.items()}
    for name, key in ((RANKS_PER_NODE, "gpus_per_node"), (NODES, "nodes")):
        number, line, shown = sizes.get(name, (None, 0, ""))
        if number:
            job.put(key, number, shown, line)
        elif shown and key not in job.values:
            job.without_effect.append((line, shown, f"the number is known only inside the job; give {_FLAGS[key]}"))
    ranks, line, shown = sizes.get(RANKS, (None, 0, ""))
    if (ranks or 0) > 1 and not job.values.keys() & {"nodes", "gpus_per_node"} and not _counts_machines(launch):
        reason = f"{ranks} ranks become {ranks} GPUs of one node, because nothing says how many a node has; "
        job.remarks.append((line, shown, f"{reason}give --nodes and --gpus-per-node for more nodes"))
    _put_ranks(ranks, line, shown, sizes.get(NODES, (None, 0, ""))[0], NODES in sizes, job)
    if not launch.programs and not job.values.keys() & {"nodes", "gpus_per_node"}:
        job.put("gpus_per_node", 1, "one process without a launcher", launch.line)


def _counts_machines(launch: LaunchLine) -> bool:
    """True for accelerate, whose ranks are those of one machine unless it says another number."""
    return any(program.startswith("accelerate") for program in launch.programs)


def _put_ranks(ranks: int | None, line: int, shown: str, nodes: int | None, has_nodes: bool, job: JobMeaning) -> None:
    """Nodes or GPUs of a node, from the number of all ranks."""
    if ranks and not has_nodes:
        per_node = job.values.get("gpus_per_node")
        if per_node and ranks % per_node == 0:
            job.put("nodes", ranks // per_node, f"{shown}, {per_node} of each node", line)
        elif "nodes" not in job.values:
            job.put("gpus_per_node", ranks, shown, line)
        elif ranks % job.values["nodes"] == 0:
            job.put("gpus_per_node", ranks // job.values["nodes"], shown, line)
    elif ranks and nodes and "gpus_per_node" not in job.values and ranks % job.values["nodes"] == 0:
        job.put("gpus_per_node", ranks // job.values["nodes"], shown, line)
    elif shown and not ranks and "nodes" not in job.values:
        job.without_effect.append((line, shown, "the number is known only inside the job; give --nodes"))


_FLAGS = {"nodes": "--nodes", "gpus_per_node": "--gpus-per-node"}


def _put_environment(environment: Mapping[str, Value], line: int, job: JobMeaning) -> None:
    for name, value in environment.items():
        where = value[0].line if value else line
        missing, text = missing_of(value), text_of(value)
        if name in _TOLD_BY_LAUNCHER:
            continue
        if may_be_secret(name):
            job.without_effect.append((where, f"export {name}", f"a secret stays out of configs; give --secret {name}"))
        elif name == "CUDA_VISIBLE_DEVICES":
            job.without_effect.append((where, f"export {name}", "the scheduler decides about the GPUs of a job"))
        elif not _KEPT.fullmatch(name) or _NOT_KEPT.fullmatch(name):
            continue
        elif missing is not None or "~" in text or "\0" in text:
            job.without_effect.append((where, f"export {name}", "the value is known only inside the job; give --env"))
        else:
            job.put("env", {name: text}, f"export {name}", where)


def _origin(text: str, line: int) -> str:
    return f"{text}, line {line}" if line else text
