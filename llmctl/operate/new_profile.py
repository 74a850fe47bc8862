"""Text of a new cluster profile: given values, and all other keys as comments."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.backends import load_backend
from llmctl.backends.base import Capabilities, ProfileHints


@dataclass(frozen=True)
class NewProfile:
    """Values of a new cluster; the fields are those of ClusterProfile."""

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
    """YAML with comments. Values are JSON strings, which YAML reads the same for any content."""
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
        *_rendezvous(profile, hints),
        "# Variables of every job.",
        '# env: {NCCL_SOCKET_IFNAME: ib0, HTTPS_PROXY: "http://proxy:3128"}',
        "# Seconds that a run has to save after the signal to stop.",
        "# stop_grace_s: 120",
    ]
    return "\n".join(lines) + "\n"


def _place(profile: NewProfile, capabilities: Capabilities) -> list[str]:
    lines = [
        "# Folder of the run directories, on a file system that all nodes share, with space for checkpoints.",
        f"runs_root: {json.dumps(profile.runs_root)}",
    ]
    if capabilities.has_queue:
        lines += [
            "# The login node as ssh knows it. Without this key, this machine is a login node.",
            f"login: {{host: {json.dumps(profile.login)}}}" if profile.login else "# login: {host: cluster}",
        ]
    if capabilities.starts_on_hosts:
        lines += [
            "# The machines, head node first, as ssh knows them.",
            f"hosts: {_list(profile.hosts)}" if profile.hosts else "# hosts: [gpu1, gpu2]",
            "# false: the machines share no folder, and each keeps its own run directory.",
            "# shared: true",
        ]
    return lines


def _group(profile: NewProfile, hints: ProfileHints) -> list[str]:
    return [
        f"# {hints.group or 'Group to bill.'} --group and LLMCTL_GROUP take precedence.",
        f"group: {json.dumps(profile.group)}" if profile.group else "# group: my-group",
        "# true: the site refuses jobs without a group, so llmctl asks for one first.",
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
        "# Limits of the site, checked before submitting.",
        "# limits: {max_nodes: 16, max_time: '24:00:00'}",
    ]


def _environment(profile: NewProfile) -> list[str]:
    lines = [
        f"  modules: {_list(profile.modules)}" if profile.modules else "  # modules: [cuda/12.8]",
        f"  kind: {profile.kind}" if profile.kind else "  # kind: venv            # or conda, or container",
        f"  path: {json.dumps(profile.path)}" if profile.path else "  # path: ~/venvs/llm      # goes with kind",
        f"  python: {json.dumps(profile.python)}"
        if profile.python
        else "  # python: /usr/bin/python3   # instead of the environment's interpreter",
        '  # setup: ["ulimit -n 65536"]  # shell lines, run unchanged',
    ]
    is_set = bool(profile.modules or profile.kind or profile.python)
    return [
        "# The Python environment that jobs run in.",
        "environment:" if is_set else "# environment:",
        *(lines if is_set else (f"# {line.replace('# ', '', 1)}" for line in lines)),
    ]


def _rendezvous(profile: NewProfile, hints: ProfileHints) -> list[str]:
    lines = [
        "# Rendezvous of the ranks: network interface of the head node, and ports.",
        f"rendezvous: {{interface: {json.dumps(profile.interface)}, ports: [20000, 29999]}}"
        if profile.interface
        else "# rendezvous: {interface: ib0, ports: [20000, 29999]}",
    ]
    if hints.launchers:
        lines += [
            "# Launcher of the ranks.",
            f"# launch: {{launcher: {hints.launchers.replace('   #', '}   #')}",
            "# Container runtime (--container): pyxis, enroot, apptainer or singularity.",
            "# container: {runtime: apptainer, options: ['--nv']}",
        ]
    return lines


def _list(words: Sequence[str]) -> str:
    return json.dumps(list(words))
