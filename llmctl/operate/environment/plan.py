"""The plan of an environment: its steps, the place, and what stands there."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmctl.context import Context
from llmctl.operate.environment.steps import RECORD, Step, Wanted, keys_of
from llmctl.transport.file_reads import FileRead

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile
    from llmctl.submit.job import Flag
    from llmctl.transport.protocol import Transport

# Packages on PYTHONPATH would count as installed.
_PREPARE = """\
set -euo pipefail
unset PYTHONPATH
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 GIT_TERMINAL_PROMPT=0
"""


@dataclass(frozen=True)
class Site:
    """The machine and folders of a build.

    Attributes:
        context: of this call.
        profile: of the cluster, with all paths resolved.
        transport: to the machine that makes the environment.
        flags: of the job that compiles.
        own: the user's own folder beside the runs: logs, and pip's cache where the home directory is small.
    """

    context: Context
    profile: "ClusterProfile"
    transport: "Transport"
    own: str
    flags: "Sequence[Flag]" = ()

    @property
    def bare_profile(self) -> "ClusterProfile":
        """The profile without its environment, which may not exist yet: modules and shell lines only."""
        software = self.profile.environment.model_copy(update={"kind": None, "path": None})
        return self.profile.model_copy(update={"environment": software})

    def log(self, step: Step) -> str:
        """The file of a step's output."""
        return f"{self.own}/env-build/{step.name.replace(' ', '-')}.log"

    def script(self, lines: Sequence[str]) -> str:
        """The shell text of the lines of a step."""
        cache = f"export PIP_CACHE_DIR={shlex.quote(f'{self.own}/cache/pip')}\n" if self.has_queue else ""
        return _PREPARE + cache + "\n".join(lines) + "\n"

    @property
    def has_queue(self) -> bool:
        """True if jobs wait for nodes."""
        return self.context.backend(self.profile).capabilities.has_queue


@dataclass(frozen=True)
class Found:
    """The contents of an environment's path.

    Attributes:
        records: the steps by name, with ``key``, and ``inputs`` and ``finished`` once done, or ``run_id`` while a job
            has the step; None without our record.
        is_free: True if nothing is there, or an empty folder.
    """

    records: Mapping[str, Mapping[str, Any]] | None
    is_free: bool

    @property
    def python(self) -> str | None:
        """The interpreter that made the environment; None if there is none."""
        python = (self.records or {}).get("venv", {}).get("inputs", {}).get("python")
        return python if isinstance(python, str) else None


@dataclass(frozen=True)
class Plan:
    """An environment to build.

    Attributes:
        wanted: the environment.
        steps: its steps, in order.
        found: what stands at its path.
        site: the machine and its folders.
        torch_reason: why torch comes from its index; empty if pip chooses.
    """

    wanted: Wanted
    steps: Sequence[Step]
    found: Found
    site: Site
    torch_reason: str


def look_at(path: str, transport: "Transport") -> Found:
    """Read the record of the environment at ``path``."""
    (part,) = transport.read_parts([FileRead(f"{path}/{RECORD}", limit=1 << 20)])
    if part is None:
        (facts,) = transport.stat_paths([path])
        (names,) = transport.list_names([path]) if facts.kind == "folder" else ([],)
        return Found(None, is_free=not facts.kind or (facts.kind == "folder" and not names))
    try:
        steps = json.loads(part.data)["steps"].items()
        return Found({name: record for name, record in steps if isinstance(record, dict)}, is_free=False)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Found({}, is_free=False)


def states(plan: Plan) -> list[str]:
    """The state of each step: ``done``, ``changed`` or ``to do``. None is done after one that is not."""
    records, result = plan.found.records or {}, list[str]()
    for step, key in zip(plan.steps, keys_of(plan.steps), strict=True):
        record = records.get(step.name, {})
        is_first = all(state == "done" for state in result)
        is_same = record.get("key") == key
        result.append("to do" if not is_first or "finished" not in record else "done" if is_same else "changed")
    return result


def plan_lines(plan: Plan) -> Iterator[str]:
    """Lines of a dry run: the steps, their states and commands."""
    wanted, site = plan.wanted, plan.site
    yield f"environment  {wanted.path}"
    yield f"cluster      {site.profile.name}, on {site.transport.host}"
    source = (
        f"{wanted.torch_index}, for {plan.torch_reason}" if wanted.torch_index else wanted.find_links or "pip's index"
    )
    yield f"torch        {wanted.torch} from {source}"
    if wanted.modules:
        yield f"first        {'; '.join(wanted.modules)}"
    for number, (step, state) in enumerate(zip(plan.steps, states(plan), strict=True), 1):
        place = f", in a job of {site.profile.name} unless its wheel is there" if step.in_job and site.has_queue else ""
        yield f"{number}  {step.name}: {state}{place}"
        yield from (f"     {line}" for line in step.lines)
