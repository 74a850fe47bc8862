"""``llmctl doctor``: check that a cluster works as its profile says, with remedies.

Four round trips for any number of checks: the home directory, the paths, one shell script, one Python program.
"""

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.backends import capabilities_of
from llmctl.context import Context
from llmctl.distribution import install_words
from llmctl.doctor.cluster import judge_container, judge_group, judge_node, judge_places, judge_scheduler, probes
from llmctl.doctor.probes import PYTHON_PROGRAM, Section, parse_gpus, parse_python, parse_sections, probe_script
from llmctl.doctor.python import Check, judge_driver, judge_node_python, judge_python
from llmctl.errors import LlmctlError, ProfileError, SchedulerError
from llmctl.paths import UserFolders
from llmctl.submit.decide import job_python
from llmctl.submit.execute import FIND_NODE_PYTHON
from llmctl.submit.render import environment_script

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile
    from llmctl.transport.protocol import Transport

_SCRIPT_TIMEOUT_S = 240
_PYTHON_TIMEOUT_S = 240
"""Importing torch from a cold network file system takes minutes."""


def examine(context: Context, profile: "ClusterProfile") -> Iterator[Check]:
    """Yield the checks of one cluster as they complete; ends early if the cluster cannot be reached."""
    transport, connection = _connection(context, profile)
    yield from connection
    if transport is None:
        return
    root, trouble = _runs_root(context, profile)
    try:
        facts = transport.stat_paths([root])[0] if root is not None else None
        nearest = facts.nearest if facts is not None and facts.nearest_kind == "folder" else None
        began = time.time()
        # One script for all questions: each round trip to a login node can take seconds.
        asked = [*probes(profile, root, nearest), ("supervisor", FIND_NODE_PYTHON)]
        answer = transport.run(["bash", "-c", probe_script(asked)], timeout_s=_SCRIPT_TIMEOUT_S, only_reads=True)
    except SchedulerError as error:
        # Nothing below can be judged without the answers.
        again = "try again; if the problem persists, the node is overloaded"
        yield Check("questions", "FAULT", error.message, again, error.exit_code)
        return
    ended = time.time()
    sections = _Answers(parse_sections(answer.stdout))
    yield from judge_scheduler(profile, sections)
    yield from judge_group(profile, context.environment.get("LLMCTL_GROUP") or profile.group, sections)
    if root is not None and facts is not None:
        yield from judge_places(profile, root, facts, sections)
    yield from trouble
    python, checks = _python(context, profile, transport)
    yield from checks
    yield judge_node_python(profile, sections["supervisor"])
    capabilities = capabilities_of(profile.scheduler)
    yield judge_driver(parse_gpus(sections["gpus"].text), python, expected=not capabilities.has_queue)
    yield from judge_container(profile, sections)
    yield from judge_node(profile, sections, began, ended)
    if capabilities.starts_on_hosts:
        from llmctl.doctor.hosts import ask_hosts, judge_hosts
        from llmctl.transport.host_group import HostGroup

        assert isinstance(transport, HostGroup)
        interpreter = _interpreter(context, profile, transport)
        yield from judge_hosts(profile, ask_hosts(transport, interpreter, root), interpreter)


def exit_code(checks: list[Check]) -> int:
    """Exit code of the command: the class of the first fault; 0 without a fault."""
    return next((check.exit_code for check in checks if check.state == "FAULT"), 0)


class _Answers(dict[str, Section]):
    """Sections by name. A section missing from a truncated answer counts as a command that does not exist."""

    def __missing__(self, name: str) -> Section:
        return Section(127, "")


def _connection(context: Context, profile: "ClusterProfile") -> tuple["Transport | None", list[Check]]:
    if capabilities_of(profile.scheduler).starts_on_hosts and not profile.hosts:
        remedy = f"llmctl clusters setup {profile.name} --host A --host B"
        return None, [Check("connection", "FAULT", "the profile names no machine", remedy)]
    began = time.monotonic()
    try:
        transport = context.connect(profile)
        transport.home()
    except LlmctlError as error:
        host = profile.hosts[0] if profile.hosts else profile.login.host
        remedy = f"ssh {host}   # shows more" if host is not None else ""
        return None, [Check("connection", "FAULT", error.message, remedy, error.exit_code)]
    took = f", {time.monotonic() - began:.1f} s" if transport.is_remote else ""
    return transport, [Check("connection", "ok", f"{transport.host}{took}")]


def _runs_root(context: Context, profile: "ClusterProfile") -> tuple[str | None, list[Check]]:
    try:
        return context.runs_root(profile), []
    except ProfileError as error:
        remedy = f"llmctl clusters setup {profile.name} --runs-root DIR"
        return None, [Check("runs_root", "FAULT", error.message.splitlines()[0], remedy)]


def _python(
    context: Context, profile: "ClusterProfile", transport: "Transport"
) -> tuple[dict[str, Any] | None, list[Check]]:
    """Facts about the jobs' Python, and its checks. The facts are None if Python cannot start here."""
    software = profile.environment
    argv = [_interpreter(context, profile, transport), "-c", PYTHON_PROGRAM]
    if software.kind == "container":
        image = str(software.path)
        if profile.container.runtime not in ("apptainer", "singularity") or not image.startswith("/"):
            return None, [Check("python", "note", f"is in the image {image}, which cannot be started on this node")]
        argv = [profile.container.runtime, "exec", image, *argv]
    try:
        script = environment_script(profile, _folders_there(context, transport))
        answer = transport.run(["bash", "-c", script, "bash", *argv], timeout_s=_PYTHON_TIMEOUT_S, only_reads=True)
    except SchedulerError as error:
        return None, [_broken_environment(profile, error.message)]
    facts = parse_python(answer.stdout)
    if facts is None:
        if "Exec format error" in answer.stderr:
            detail = f"{argv[0]} is for another processor architecture than this node's; check from a compute node"
            return None, [Check("python", "note", detail)]
        said = " ".join((answer.stderr or answer.stdout).split())[-300:] or f"exit status {answer.exit_status}"
        return None, [_broken_environment(profile, said)]
    checks = [Check("modules", "ok", " ".join(software.modules))] if software.modules else []
    kind = profile.resource_types.get(profile.defaults.resource_type or "")
    return facts, [*checks, *judge_python(facts, kind.gpu if kind is not None else None)]


def _folders_there(context: Context, transport: "Transport") -> UserFolders:
    return replace(context.folders, home=Path(transport.home()))


def _interpreter(context: Context, profile: "ClusterProfile", transport: "Transport") -> str:
    own = "python3" if transport.is_remote else sys.executable
    return job_python(profile, _folders_there(context, transport), own)


def _broken_environment(profile: "ClusterProfile", said: str) -> Check:
    """The check of an environment whose Python does not start; one that does not exist can be built."""
    if profile.environment.kind == "venv" and "the virtual environment cannot be activated" in said:
        cure = ("llmctl", "env", "build", "--cluster", profile.name)
        return Check("environment", "FAULT", said, shlex.join(cure), cure=cure)
    return Check("environment", "FAULT", said, _mend_environment(profile, said))


def _mend_environment(profile: "ClusterProfile", said: str) -> str:
    software = profile.environment
    if software.modules and "module" in said:
        return f"module avail; then llmctl clusters setup {profile.name} --module NAME, or module_init in your overlay"
    words = install_words(elsewhere=True)  # the command may be copied to another machine
    if software.kind == "venv":
        return f"python3.12 -m venv {software.path} && {software.path}/bin/pip install {words}"
    if software.kind == "conda":
        return f"conda create -p {software.path} python=3.12, then pip install {words} in it"
    return f"llmctl clusters setup {profile.name} --venv DIR"
