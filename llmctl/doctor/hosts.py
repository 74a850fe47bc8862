"""Checks of each machine of a cluster behind ssh: reachable, same GPUs, shared runs_root."""

import shlex
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from llmctl.doctor.probes import Section, parse_gpus, parse_sections, probe_script
from llmctl.doctor.python import Check
from llmctl.errors import SchedulerError

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile
    from llmctl.transport.host_group import HostGroup

_TIMEOUT_S = 60
_AT_ONCE = 16

Answer = dict[str, Section] | SchedulerError
"""A machine's answers, or the reason why it is unreachable."""


def ask_hosts(group: "HostGroup", python: str, runs_root: str | None) -> dict[str, Answer]:
    """Probe all machines concurrently; their answers, or the reason why a machine is unreachable.

    Args:
        group: the machines.
        python: the jobs' interpreter.
        runs_root: folder of the run directories; None if unknown.
    """
    commands = [
        ("python", f"command -v -- {shlex.quote(python)}"),
        ("gpus", "nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader"),
    ]
    if runs_root is not None:
        # Equal inode and times on two machines mean one shared folder. The probe writes nothing.
        commands.append(("place", f"stat -c '%i %Y %Z' -- {shlex.quote(runs_root)}"))
    script = probe_script(commands)

    def ask(host: str) -> Answer:
        try:
            return parse_sections(group.transport_of(host).run(["bash", "-c", script], timeout_s=_TIMEOUT_S).stdout)
        except SchedulerError as error:
            return error

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(group.hosts, pool.map(ask, group.hosts), strict=True))


def judge_hosts(profile: "ClusterProfile", answers: Mapping[str, Answer], python: str) -> list[Check]:
    """One check per machine, and one check of a shared runs_root."""
    checks = []
    places = {}
    kind = profile.resource_types.get(profile.defaults.resource_type or "")
    for host, answer in answers.items():
        if isinstance(answer, SchedulerError):
            checks.append(
                Check(f"host {host}", "FAULT", answer.message, f"ssh {host}   # shows more", answer.exit_code)
            )
            continue
        gpus = parse_gpus(answer["gpus"].text) if "gpus" in answer else []
        found = ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus).items()) or "no GPU"
        if answer.get("python", Section(127, "")).status != 0:
            remedy = "create the environment there too, at the same path, or in a folder that all machines share"
            checks.append(Check(f"host {host}", "FAULT", f"{found}; {python} does not exist", remedy))
        elif kind is not None and len(gpus) < kind.gpus:
            remedy = "set gpus of the resource type in your overlay, or remove the machine from hosts"
            checks.append(Check(f"host {host}", "warning", f"{found}, but the profile says {kind.gpus}", remedy))
        else:
            checks.append(Check(f"host {host}", "ok", found))
        if "place" in answer and answer["place"].status == 0:
            places[host] = answer["place"].text
    return [*checks, *_sharing(profile, places, len(answers))]


def _sharing(profile: "ClusterProfile", places: dict[str, str], count: int) -> list[Check]:
    if not profile.shared or count < 2:
        return []
    if len(places) < count:
        detail = f"runs_root exists on {len(places)} of {count} machines: unknown yet whether they share it"
        return [Check("shared", "note", detail)]
    if len(set(places.values())) == 1:
        return [Check("shared", "ok", f"runs_root is one folder on all {count} machines")]
    remedy = "mount one folder on all of them, or set shared: false in your overlay"
    return [Check("shared", "FAULT", "runs_root is a different folder on different machines", remedy)]
