"""Decide every value of an environment that the command line leaves open, from the profile and the machine."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmctl.backends import capabilities_of
from llmctl.context import Context, is_remote, resolve_profile_paths
from llmctl.distribution import NAME, install_words
from llmctl.doctor.probes import parse_gpus
from llmctl.doctor.torch_wheels import ARCHITECTURES, TorchIndex, choose_index
from llmctl.errors import ProfileError, SchedulerError, UsageError
from llmctl.operate.environment.compile_steps import compile_steps
from llmctl.operate.environment.packages import Package, parse_package
from llmctl.operate.environment.plan import Plan, Site, look_at
from llmctl.operate.environment.steps import Wanted, plan_steps
from llmctl.submit.job import Flag

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile
    from llmctl.transport.protocol import Transport

OLDEST_TORCH = "2.10"
"""As in the extra ``train``."""
_GPUS = ("nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)+([a-z.+][0-9a-z.+]*)?")
_LOOK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Asked:
    """The flags of ``llmctl env build``; None for those that are not given.

    Attributes:
        path: folder of the environment.
        python: interpreter that makes it.
        torch: version of torch.
        index_url: index of torch's wheels.
        find_links: folder of wheels in place of every index.
        packages: words of ``--with``.
        job: values of the job that compiles, by key of the job section; None for those that are not given.
    """

    path: str | None = None
    python: str | None = None
    torch: str | None = None
    index_url: str | None = None
    find_links: str | None = None
    packages: tuple[str, ...] = ()
    job: Mapping[str, Any] = field(default_factory=dict)


def plan_environment(context: Context, cluster: str | None, asked: Asked, *, dry_run: bool) -> Plan:
    """Plan the environment of a cluster; reads the machine, and writes only its own folder beside the runs.

    Raises:
        UsageError: a flag is wrong.
        ProfileError: the profile names no folder for an environment, or no torch runs on its GPUs.
        SchedulerError: the machine does not answer.
    """
    if asked.index_url is not None and "@" in asked.index_url:
        raise UsageError(
            "--index-url: a command line is visible to others, so no address with a password; put it in pip's own "
            "configuration (pip config set global.index-url ...) or in ~/.netrc of the cluster's machine"
        )
    if asked.torch is not None and not _VERSION.fullmatch(asked.torch):
        raise UsageError(f"--torch {asked.torch}: is not a version, such as {OLDEST_TORCH} or 2.11.0+cu126")
    profile = resolve_profile_paths(context.profile(*context.cluster(cluster)), context)
    _check_profile(profile)
    transport = context.connect(profile)
    path = _place(context, profile, transport, "--path", asked.path) or _path_of(profile)
    found = look_at(path, transport)
    gpus, driver = _gpus(profile, transport)
    index = _torch_index(gpus, driver, asked)
    software, own = profile.environment, _own_folder(profile, transport, dry_run=dry_run)
    wanted = Wanted(
        path=path,
        python=_place(context, profile, transport, "--python", asked.python) or found.python or _base(profile, path),
        modules=(*(f"module load {name}" for name in software.modules), *software.setup),
        torch=f"torch=={asked.torch}" if asked.torch is not None else f"torch>={OLDEST_TORCH}",
        torch_index=index.url if index is not None else None,
        find_links=_folder(context, profile, transport, asked.find_links),
        llmctl=_llmctl(profile, asked),
        own=own,
        architectures=_architectures(gpus),
        node_size=_node_size(profile, asked),
    )
    packages = [_package(word, wanted, context, profile, transport) for word in asked.packages]
    steps = [*plan_steps(wanted), *compile_steps(wanted, packages)]
    flags = tuple(Flag(f"--{key.replace('_', '-')}", f"job.{key}", value) for key, value in asked.job.items() if value)
    site = Site(context, profile, transport, own, flags)
    return Plan(wanted, steps, found, site, index.reason if index is not None else "")


def _check_profile(profile: "ClusterProfile") -> None:
    if profile.environment.kind == "container":
        raise ProfileError(
            f"the jobs of {profile.name} run in the image {profile.environment.path}, which has their software\n"
            f"llmctl clusters setup {profile.name} --venv FOLDER runs them in a virtual environment instead"
        )
    if len(profile.hosts) > 1 and not profile.shared:
        raise ProfileError(
            f"the hosts of {profile.name} share no files (shared: false): an environment is needed on each\n"
            "build it with a profile of one host at a time"
        )


def _package(word: str, wanted: Wanted, context: Context, profile: "ClusterProfile", transport: "Transport") -> Package:
    """A package of ``--with``; a file gets its digest, so that another file is another input."""
    package = parse_package(word)
    levels = [tuple(int(part) for part in level.split(".")) for level in wanted.architectures]
    if levels and max(levels) < package.recipe.oldest:
        oldest = ".".join(str(part) for part in package.recipe.oldest)
        raise ProfileError(
            f"--with {word}: runs on GPUs of compute capability {oldest} or later, and those of {profile.name} have "
            f"{', '.join(wanted.architectures)}"
        )
    path = _place(context, profile, transport, "--with", package.path)
    if path is None:
        return package
    answer = transport.run(["sha256sum", "--", path], timeout_s=_LOOK_TIMEOUT_S, only_reads=True)
    if answer.exit_status:
        raise UsageError(f"--with {word}: {' '.join(answer.stderr.split())[-200:]}")
    return replace(package, path=path, digest=answer.stdout.lstrip("\\").split()[0])


def _architectures(gpus: Mapping[str, str | None] | None) -> list[str]:
    """Compute capabilities, in order; empty unless all GPUs are known and NVIDIA's."""
    levels = {level or "" for level in (gpus or {}).values()}
    if any(not level or level.startswith("gfx") for level in levels):
        return []
    return sorted(levels, key=lambda level: tuple(int(part) for part in level.split(".")))


def _node_size(profile: "ClusterProfile", asked: Asked) -> tuple[float, float]:
    """Cores and memory of the nodes that compile, by the profile; 0 if unknown."""
    kind = profile.resource_types.get(asked.job.get("resource_type") or profile.defaults.resource_type or "")
    return (kind.cores or 0, kind.memory_gib or 0) if kind is not None else (0, 0)


def _place(
    context: Context, profile: "ClusterProfile", transport: "Transport", flag: str, given: str | None
) -> str | None:
    """A path of the command line, absolute on the cluster's machine; a bare name of a program stays."""
    if given is None or (flag == "--python" and "/" not in given):
        return given
    # The user's shell has replaced variables, but not the home directory of another machine.
    path = transport.home() + given[1:] if given == "~" or given.startswith("~/") else given
    if not is_remote(profile):
        return os.path.normpath(context.cwd / path)
    if not path.startswith("/"):
        raise UsageError(f"{flag} {given}: paths on the machines of {profile.name} must begin with / or ~/")
    return os.path.normpath(path)


def _folder(context: Context, profile: "ClusterProfile", transport: "Transport", given: str | None) -> str | None:
    """The folder of ``--find-links``, absolute on the cluster's machine: pip would only warn of one that is missing."""
    path = _place(context, profile, transport, "--find-links", given)
    if path is None or transport.run(["test", "-d", path], timeout_s=_LOOK_TIMEOUT_S, only_reads=True).exit_status == 0:
        return path
    raise UsageError(f"--find-links {given}: is not a folder on the machine of {profile.name}")


def _path_of(profile: "ClusterProfile") -> str:
    software = profile.environment
    if software.kind == "venv" and software.path is not None:
        return software.path
    named = f"the jobs of {profile.name} run in the {software.kind} {software.path}" if software.kind else ""
    raise ProfileError(
        f"{named or f'the profile {profile.name} names no virtual environment'}; give its folder with --path\n"
        f"llmctl clusters setup {profile.name} --venv FOLDER makes it that of the jobs"
    )


def _base(profile: "ClusterProfile", path: str) -> str:
    """The interpreter that makes the environment: of the profile, unless it is in the environment; or the first."""
    python = profile.environment.python
    if python is not None and not python.startswith(f"{path}/"):
        return python
    is_here = capabilities_of(profile.scheduler).starts_in_place and not is_remote(profile)
    return sys.executable if is_here and not profile.environment.modules else "python3"


def _torch_index(gpus: Mapping[str, str | None] | None, driver: str | None, asked: Asked) -> TorchIndex | None:
    """The index of torch's wheels; None for pip's own, if the GPUs are unknown or a folder has the wheels."""
    if asked.index_url is not None:
        return TorchIndex(asked.index_url, "--index-url")
    if asked.find_links is not None or gpus is None:
        return None
    index = choose_index(gpus, driver)
    if index is None:
        names = ", ".join(f"{gpu} ({level})" for gpu, level in gpus.items())
        raise ProfileError(
            f"no build of torch runs on all of {names}{f' with driver {driver}' if driver else ''}\n"
            "choose one with --index-url (https://pytorch.org/get-started/previous-versions/), in an environment for "
            "each kind of node"
        )
    return index


def _gpus(profile: "ClusterProfile", transport: "Transport") -> tuple[dict[str, str | None] | None, str | None]:
    """GPUs of the nodes with their architectures, and their driver if known; None: unknown."""
    kinds = profile.resource_types.values()
    if capabilities_of(profile.scheduler).has_queue:
        # The login node says nothing about the nodes.
        names = {kind.gpu for kind in kinds if kind.gpus}
        if not kinds or None in names:
            return None, None
        return {str(name): ARCHITECTURES.get(str(name)) for name in names}, None
    try:
        answer = transport.run(_GPUS, timeout_s=_LOOK_TIMEOUT_S, only_reads=True)
    except SchedulerError as error:
        if error.transient:
            raise
        return {}, None
    gpus = parse_gpus(answer.stdout) if answer.exit_status == 0 else []
    return {gpu.name: gpu.capability for gpu in gpus}, gpus[0].driver if gpus else None


def _llmctl(profile: "ClusterProfile", asked: Asked) -> list[str]:
    """Words for pip: this llmctl with its extra; elsewhere the packages, since each job brings llmctl's code."""
    if asked.find_links is not None and not is_remote(profile):
        return [f"{NAME}[train]"]
    return shlex.split(install_words(elsewhere=is_remote(profile)))


def _own_folder(profile: "ClusterProfile", transport: "Transport", *, dry_run: bool) -> str:
    """The user's own folder beside the runs; of a dry run only its name, which another machine has not told."""
    root = str(profile.runs_root)
    if dry_run:
        return f"{root}/.llmctl-{'UID' if is_remote(profile) else os.geteuid()}"
    try:
        return f"{root}/{transport.make_own_folder(root)[0]}"
    except OSError as error:
        raise ProfileError(f"{profile.name}: runs_root: {root} cannot be written: {error}") from None
