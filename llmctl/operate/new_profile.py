"""The text of a new cluster profile: the values given, and every other key as a comment that says what it is for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.backends import load_backend
from llmctl.backends.base import Capabilities, ProfileHints


@dataclass(frozen=True)
class NewProfile:
    """What is known about a new cluster; the fields are those of ClusterProfile."""

    scheduler: str
    runs_root: str
    description: str = ""
    login: str | None = None
    hosts: tuple[str, ...] = ()
    group: str | None = None
    resource_type: str | None = None
    gpus: int | None = None
    interface: str | None = None
    kind: str | None = None
    path: str | None = None
    python: str | None = None
    modules: tuple[str, ...] = ()


def profile_text(profile: NewProfile) -> str:
    """YAML with comments. Values are written as JSON strings, which YAML reads the same whatever they hold."""
    backend = load_backend(profile.scheduler)
    capabilities, hints = backend.capabilities, backend.profile_hints()
    lines = [
        "# A cluster of your own. Check it with `llmctl clusters validate` and `llmctl doctor`.",
        "# Every key is explained in the bundled profile slurm: `llmctl clusters show slurm` names its file.",
        f"description: {json.dumps(profile.description)}",
        f"scheduler: {profile.scheduler}",
        *_place(profile, capabilities),
        *(_group(profile, hints) if hints.group or profile.group else []),
        *(_resources(profile, hints) if hints.node_types else []),
        *_environment(profile),
        *_meeting(profile, hints),
        "# Variables that every job gets.",
        '# env: {NCCL_SOCKET_IFNAME: ib0, HTTPS_PROXY: "http://proxy:3128"}',
        "# Seconds that a run gets to save once it has been told to stop.",
        "# stop_grace_s: 120",
    ]
    return "\n".join(lines) + "\n"


def _place(profile: NewProfile, capabilities: Capabilities) -> list[str]:
    lines = [
        "# Holds the run directories; on a file system that all nodes share, with room for checkpoints.",
        f"runs_root: {json.dumps(profile.runs_root)}",
    ]
    if capabilities.has_queue:
        lines += [
            "# The login node as ssh knows it. Without it this machine is one.",
            f"login: {{host: {json.dumps(profile.login)}}}" if profile.login else "# login: {host: cluster}",
        ]
    if capabilities.starts_on_hosts:
        lines += [
            "# The machines, the head first, as ssh knows them.",
            f"hosts: {_list(profile.hosts)}" if profile.hosts else "# hosts: [gpu1, gpu2]",
            "# false: they share no folder, and each keeps a run directory of its own.",
            "# shared: true",
        ]
    return lines


def _group(profile: NewProfile, hints: ProfileHints) -> list[str]:
    return [
        f"# {hints.group or 'What is billed to.'} --group and LLMCTL_GROUP go before it.",
        f"group: {json.dumps(profile.group)}" if profile.group else "# group: my-group",
        "# true: the site refuses jobs without one, so llmctl asks for it first.",
        "# group_required: true",
    ]


def _resources(profile: NewProfile, hints: ProfileHints) -> list[str]:
    lines = [f"# The kinds of nodes. {hints.node_types}"]
    if profile.resource_type is None:
        return [
            *lines,
            "# resource_types:",
            f"#   gpu: {hints.example_type}",
            "# defaults: {resource_type: gpu, time: '1:00:00'}",
        ]
    name = json.dumps(profile.resource_type)
    return [
        *lines,
        f"# Further keys: {hints.example_type}",
        "resource_types:",
        f"  {name}: {{gpus: {profile.gpus or 0}}}",
        f"defaults: {{resource_type: {name}}}",
        "# What is refused before the queue does it.",
        "# limits: {max_nodes: 16, max_time: '24:00:00'}",
    ]


def _environment(profile: NewProfile) -> list[str]:
    lines = [
        f"  modules: {_list(profile.modules)}" if profile.modules else "  # modules: [cuda/12.8]",
        f"  kind: {profile.kind}" if profile.kind else "  # kind: venv            # or conda, or container",
        f"  path: {json.dumps(profile.path)}" if profile.path else "  # path: ~/venvs/llm      # goes with kind",
        f"  python: {json.dumps(profile.python)}"
        if profile.python
        else "  # python: /usr/bin/python3   # instead of the environment's own",
        '  # setup: ["ulimit -n 65536"]  # shell lines, taken as they are',
    ]
    is_set = bool(profile.modules or profile.kind or profile.python)
    return [
        "# The Python environment that jobs run in.",
        "environment:" if is_set else "# environment:",
        *(lines if is_set else (f"# {line.replace('# ', '', 1)}" for line in lines)),
    ]


def _meeting(profile: NewProfile, hints: ProfileHints) -> list[str]:
    lines = [
        "# Where the ranks meet: the interface of the head node's address, and ports.",
        f"rendezvous: {{interface: {json.dumps(profile.interface)}, ports: [20000, 29999]}}"
        if profile.interface
        else "# rendezvous: {interface: ib0, ports: [20000, 29999]}",
    ]
    if hints.launchers:
        lines += [
            "# How ranks are started.",
            f"# launch: {{launcher: {hints.launchers.replace('   #', '}   #')}",
            "# How images are run (--container): pyxis, enroot, apptainer or singularity.",
            "# container: {runtime: apptainer, options: ['--nv']}",
        ]
    return lines


def _list(words: Sequence[str]) -> str:
    return json.dumps(list(words))
