"""The text of a new cluster profile: the values given, and every other key as a comment that says what it is for."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class NewProfile:
    """What is known about a new cluster; the fields are those of ClusterProfile."""

    scheduler: str
    runs_root: str
    description: str = ""
    group: str | None = None
    kind: str | None = None
    path: str | None = None
    modules: tuple[str, ...] = ()


def profile_text(profile: NewProfile) -> str:
    """YAML with comments. Values are written as JSON strings, which YAML reads the same whatever they hold."""
    environment = [
        f"  modules: {json.dumps(list(profile.modules))}" if profile.modules else "  # modules: [cuda/12.8]",
        f"  kind: {profile.kind}" if profile.kind else "  # kind: venv            # or conda; goes with path",
        f"  path: {json.dumps(profile.path)}" if profile.path else "  # path: ~/venvs/llm",
        "  # python: /usr/bin/python3   # instead of the environment's own",
        '  # setup: ["ulimit -n 65536"]  # shell lines, taken as they are',
    ]
    has_environment = profile.modules or profile.kind
    lines = [
        "# A cluster of your own. Check it with `llmctl clusters validate`.",
        f"description: {json.dumps(profile.description)}",
        f"scheduler: {profile.scheduler}",
        "# Holds the run directories; on a file system that all nodes share, with room for checkpoints.",
        f"runs_root: {json.dumps(profile.runs_root)}",
        "# What the site bills to. --group and LLMCTL_GROUP go before it.",
        f"group: {json.dumps(profile.group)}" if profile.group else "# group: my-group",
        "# The Python environment that jobs run in.",
        "environment:" if has_environment else "# environment:",
        *(environment if has_environment else (f"# {line.replace('# ', '', 1)}" for line in environment)),
        "# Ports that the ranks may meet at.",
        "# rendezvous: {ports: [20000, 29999]}",
        "# Variables that every job gets.",
        '# env: {HTTPS_PROXY: "http://proxy:3128"}',
        "# Seconds that a run gets to save once it has been told to stop.",
        "# stop_grace_s: 120",
    ]
    return "\n".join(lines) + "\n"
