"""Checks of a login node: scheduler, group, folders, container, interface, clock. Pure."""

import re
import shlex
import stat
from collections.abc import Mapping

from llmctl.backends import capabilities_of, load_queue_backend
from llmctl.backends.base import DoctorCommands
from llmctl.doctor.file_systems import Space, parse_space
from llmctl.doctor.probes import Quota, Section, parse_interfaces, parse_quotas
from llmctl.doctor.python import Check, CheckState
from llmctl.site.profile import ClusterProfile
from llmctl.transport.file_writes import PathFacts

Sections = Mapping[str, Section]

_ABOVE = (
    'for path in "$root" "$(realpath -m -- "$root")"; do until [ "${path:-/}" = / ]; do '
    'path=$(dirname -- "$path"); stat -c "%a %u %U %n" -- "$(realpath -- "$path")"; done; done 2>/dev/null | sort -u'
)
"""Shell line: mode, owner and name of each folder above ``$root``, and above the target of its symbolic links."""
_FOLDER = re.compile(r"([0-7]+) (\d+) ([^/]+) (/.*)")
_LITTLE_GIB = 20
_SKEW_S = 5


def probes(profile: ClusterProfile, runs_root: str | None, place: str | None) -> list[tuple[str, str]]:
    """Build the probes of a cluster's login node, as named shell lines.

    Args:
        profile: the cluster's profile.
        runs_root: folder of the run directories; None if the profile names none.
        place: runs_root, or its nearest existing parent; None if that is not a folder.
    """
    asked = [
        ("who", "id -un; id -Gn"),
        ("date", "date +%s"),
        ("locale", "locale charmap"),
        ("interfaces", "PATH=$PATH:/usr/sbin:/sbin; ip -4 -o addr show"),
        ("gpus", "nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader"),
        ("home", 'df -PTk -- "$HOME"'),
        ("quota", "quota -w"),
    ]
    if runs_root is not None:
        asked.append(("above", f"root={shlex.quote(runs_root)}; {_ABOVE}"))
    if place is not None:
        folder = shlex.quote(place)
        asked += [
            ("place", f"df -PTk -- {folder}"),
            ("lustre", f'lfs quota -u "$(id -un)" {folder}'),
        ]
        if profile.group:
            asked.append(("lustre group", f"lfs quota -g {shlex.quote(profile.group)} {folder}"))
    commands = _commands(profile)
    if commands is not None:
        names = " ".join(commands.programs)
        missing = f'for name in {names}; do command -v "$name" >/dev/null || printf "%s " "$name"; done'
        asked += [
            ("commands", missing),
            ("version", commands.version),
            ("queues", commands.queues),
        ]
        if commands.accounts is not None:
            asked.append(("accounts", commands.accounts))
    if profile.container.runtime == "pyxis":
        asked.append(("container", "srun --help | grep -e --container-image"))
    elif profile.container.runtime is not None:
        asked.append(("container", f"{profile.container.runtime} --version || {profile.container.runtime} version"))
    return asked


def _commands(profile: ClusterProfile) -> DoctorCommands | None:
    """Commands that examine the scheduler; None where jobs start without a queue."""
    queue = load_queue_backend(profile.scheduler)
    return queue.doctor_commands() if queue is not None else None


def judge_scheduler(profile: ClusterProfile, sections: Sections) -> list[Check]:
    """Check the scheduler's commands, its server, and the profile's queue names."""
    commands = _commands(profile)
    if commands is None:
        return []
    missing = sections["commands"].text.split()
    if missing:
        here = "this machine" if profile.login.host is None else profile.login.host
        remedy = f"llmctl clusters setup {profile.name} --login HOST   # the cluster's login node, as ssh knows it"
        if profile.login.host is not None or len(missing) < len(commands.programs):
            remedy = f"put them on the PATH of non-interactive shells on {here}: in ~/.bashrc, before any early return"
        return [Check("scheduler", "FAULT", f"{here} has no {', '.join(missing)}", remedy, exit_code=4)]
    # A client without its server's address prints a complaint before its version.
    version = [line for line in sections["version"].text.splitlines() if re.search(r"\d+\.\d+", line)]
    shown = version[0].strip() if version else profile.scheduler
    queues = sections["queues"]
    if queues.status != 0:
        said = " ".join(queues.text.split())[-200:] or f"exit status {queues.status}"
        remedy = (
            f"try this command yourself: {commands.queues}; if it fails too, the scheduler is down or closed to you"
        )
        return [Check("scheduler", "FAULT", f"{shown}, but the server does not answer: {said}", remedy, exit_code=4)]
    return [Check("scheduler", "ok", shown), *_queues(profile, queues.text), *_old(shown, commands.oldest_version)]


def _queues(profile: ClusterProfile, text: str) -> list[Check]:
    known = {line.split()[0] for line in text.splitlines() if line.split()}
    used = {kind.queue for kind in profile.resource_types.values()} | {profile.defaults.queue}
    unknown = sorted(queue for queue in used if queue and queue not in known)
    if not unknown or not known:
        return []
    remedy = f"set queue of these resource types in your overlay; valid are {', '.join(sorted(known)[:12])}"
    return [Check("queues", "warning", f"{', '.join(unknown)} does not exist", remedy)]


def _old(version: str, oldest: str | None) -> list[Check]:
    found = re.search(r"\d+(\.\d+)+", version)
    if oldest is None or found is None or _numbers(found[0]) >= _numbers(oldest):
        return []
    detail = f"{version} is older than {oldest}, the oldest version that llmctl is tested with"
    return [Check("scheduler version", "warning", detail)]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def judge_group(profile: ClusterProfile, group: str | None, sections: Sections) -> list[Check]:
    """Check that jobs have a group to bill, and the user's membership."""
    commands = _commands(profile)
    if commands is None:
        return []
    unix = sections["who"].text.split()[1:]
    answer = sections.get("accounts")
    accounts = answer.text.split() if answer is not None and answer.status == 0 else []
    known = sorted({*accounts} if commands.accounts_are_complete else {*unix, *accounts})
    if group is None:
        if not profile.group_required:
            return [Check("group", "ok", "no group is set, and none is required")]
        choice = f" (yours: {', '.join(known[:12])})" if known else ""
        remedy = f"llmctl clusters setup {profile.name} --group G{choice}; or --group G, or LLMCTL_GROUP"
        return [Check("group", "FAULT", "jobs need a group to bill", remedy)]
    if group in known:
        return [Check("group", "ok", group)]
    if not known:
        return [Check("group", "note", f"{group}; the scheduler does not report your groups")]
    remedy = f"llmctl clusters setup {profile.name} --group G, with one of {', '.join(known[:12])}"
    state: CheckState = "FAULT" if commands.accounts_are_complete else "warning"
    return [Check("group", state, f"you are not in {group}", remedy)]


def judge_places(profile: ClusterProfile, runs_root: str, facts: PathFacts, sections: Sections) -> list[Check]:
    """Check that runs_root is writable, has space, and is probably shared by the nodes."""
    change = f"llmctl clusters setup {profile.name} --runs-root DIR"
    problem = _unwritable(runs_root, facts)
    if problem:
        return [Check("runs_root", "FAULT", problem, change)]
    place = sections.get("place")
    space = parse_space(place.text) if place is not None and place.status == 0 else None
    free_gib = min(facts.free_bytes / (1 << 30), space.free_gib if space else float("inf"))
    room = f"{runs_root}, {free_gib:,.0f} GiB free"
    checks = [Check("runs_root", "ok", room)]
    if facts.nearest == "/":
        detail = f"{runs_root}: no part of this path exists yet, not even {'/'.join(runs_root.split('/')[:2])}"
        return [Check("runs_root", "warning", detail, change)]
    if free_gib < _LITTLE_GIB:
        checks = [Check("runs_root", "warning", f"{room}: too little for checkpoints", change)]
    return [*checks, *_above(sections), *_shared(profile, runs_root, space, change), *_quotas(sections)]


def _above(sections: Sections) -> list[Check]:
    """Warn of folders above runs_root in which others can rename the next folder. An ACL shows in the group's bits."""
    lines = sections["above"].text.splitlines() if "above" in sections else []
    checks = []
    for found in filter(None, map(_FOLDER.fullmatch, lines)):
        mode, uid, user, folder = found.groups()
        bits = int(mode, 8)
        if not bits & (stat.S_IWGRP | stat.S_IWOTH) or bits & stat.S_ISVTX:
            continue
        owner = f"user {uid}" if user == "UNKNOWN" else user
        detail = (
            f"others may write to {folder} (owner {owner}, mode {bits:04o}), which has no sticky bit: they can put "
            "another folder in place of the one that leads to runs_root"
        )
        remedy = f"chmod go-w {shlex.quote(folder)}, or chmod +t, by {owner}; or another runs_root"
        checks.append(Check("above runs_root", "warning", detail, remedy))
    return checks


def _unwritable(place: str, facts: PathFacts) -> str:
    if facts.nearest_kind != "folder":
        return f"{place}: {facts.nearest} is not a folder"
    if facts.is_read_only:
        return f"{place}: {facts.nearest} is on a file system mounted read-only"
    return "" if facts.can_write else f"{place}: you cannot write to {facts.nearest}"


def _shared(profile: ClusterProfile, place: str, space: Space | None, change: str) -> list[Check]:
    if not capabilities_of(profile.scheduler).has_queue:
        return []  # one machine, or machines checked one by one
    if space is None:
        return [Check("shared", "note", f"unknown whether other nodes see {place}")]
    if space.is_network:
        return [Check("shared", "ok", f"{space.kind}; not tested from a compute node")]
    return [Check("shared", "warning", f"{place} is on {space.kind}, which other nodes may not see", change)]


def _quotas(sections: Sections) -> list[Check]:
    quotas = [quota for name in ("quota", "lustre", "lustre group") for quota in _read_quotas(sections.get(name))]
    if not quotas:
        return [Check("quota", "note", "quota and lfs report no quota; your site may have its own command")]
    fullest = max(quotas, key=lambda quota: quota.fullness)
    shown = f"{fullest.filesystem}: {fullest.fullness:.0%} used"
    if fullest.fullness >= 1:
        return [Check("quota", "FAULT", f"{shown}: no space left", "remove old runs, or ask for more")]
    if fullest.fullness > 0.9:
        return [Check("quota", "warning", shown, "remove old runs, or ask for more")]
    return [Check("quota", "ok", shown)]


def _read_quotas(section: Section | None) -> list[Quota]:
    return parse_quotas(section.text) if section is not None and section.status != 127 else []


def judge_container(profile: ClusterProfile, sections: Sections) -> list[Check]:
    """Check that the container runtime is available."""
    runtime = profile.container.runtime
    if runtime is None:
        if profile.environment.kind != "container":
            return []
        remedy = "set container.runtime in your overlay: pyxis, enroot, apptainer or singularity"
        return [Check("container", "FAULT", "environment.kind is container, but the profile names no runtime", remedy)]
    section = sections["container"]
    if section.status == 0:
        shown = "pyxis is a plug-in of srun here" if runtime == "pyxis" else section.text.strip().splitlines()[0]
        return [Check("container", "ok", shown)]
    needed = profile.environment.kind == "container"
    if runtime == "pyxis":
        what = "srun has no --container-image: pyxis is not installed"
        remedy = "ask the site for pyxis, or set container.runtime to apptainer or enroot in your overlay"
        return [Check("container", "FAULT" if needed else "warning", what, remedy)]
    remedy = "add its module, if any, to environment.modules in your overlay; it may exist on compute nodes only"
    return [Check("container", "warning", f"{runtime} is not found on this node", remedy)]


def judge_node(profile: ClusterProfile, sections: Sections, began: float, ended: float) -> list[Check]:
    """Check interface, clock and locale of the login node. They are hints about the compute nodes.

    Args:
        profile: the cluster's profile.
        sections: the answers of the probes.
        began: this machine's time when the probes were sent.
        ended: this machine's time when the answers arrived.
    """
    checks = []
    wanted = profile.rendezvous.interface
    found = parse_interfaces(sections["interfaces"].text)
    if wanted is not None and wanted in found:
        checks.append(Check("interface", "ok", f"{wanted} is {found[wanted]} here"))
    elif wanted is not None:
        there = ", ".join(name for name in found if name != "lo") or "none"
        checks.append(
            Check("interface", "note", f"{wanted} is not on this node, which has {there}; compute nodes may differ")
        )
    clock = sections["date"].text.strip()
    skew = max(began - 1 - int(clock), int(clock) - ended - 1, 0.0) if clock.isdigit() else 0.0
    if skew > _SKEW_S:
        detail = f"{skew:.0f} s apart from this machine's; llmctl computes ages by the cluster's clock"
        checks.append(Check("clock", "warning", detail, "timedatectl set-ntp true   # where the time is wrong"))
    else:
        checks.append(Check("clock", "ok", "agrees with this machine's"))
    charmap = sections["locale"].text.strip()
    if charmap.upper().replace("-", "") == "UTF8":
        checks.append(Check("locale", "ok", charmap))
    else:
        remedy = "export LC_ALL=C.UTF-8   # in ~/.bashrc there, and in environment.setup of your overlay for jobs"
        checks.append(
            Check("locale", "warning", f"{charmap.splitlines()[-1] if charmap else 'unknown'}, not UTF-8", remedy)
        )
    return checks
