"""Check of a decided job: the table of pure checks first, then questions to the machines.

Only check_job raises, once for all problems.
"""

import importlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from llmctl.context import ClusterSession, Context
from llmctl.submit.checks.site import runs_root_name_problems, runs_root_problem
from llmctl.submit.job import Job, PathCheck, Problem
from llmctl.submit.origins import Resolved, profile_error
from llmctl.transport.protocol import Transport, transport_for

if TYPE_CHECKING:
    from llmctl.paths import UserFolders
    from llmctl.site.profile import ClusterProfile
    from llmctl.submit.user_code import UserCode
    from llmctl.transport.file_writes import PathFacts
    from llmctl.transport.host_group import HostGroup


def _trains(job: Job) -> bool:
    return job.config is not None


def has_known_gpu(job: Job) -> bool:
    """True for a training run whose memory can be estimated."""
    resource = job.request.resource
    has_model = job.config is not None and job.config.model.vocab_size is not None
    return has_model and resource is not None and resource.gpu is not None and not resource.fraction


def _has_image(job: Job) -> bool:
    named = job.spec.container or job.spec.mounts
    return "container" in job.backend.job_keys if named else job.image is not None


@dataclass(frozen=True)
class Check:
    """A pure function Job -> Problems, imported only for jobs that it applies to.

    Attributes:
        place: ``module:function``, below llmctl.submit.checks.
        applies: True for jobs with the subject of the check; None: all have it.
    """

    place: str
    applies: Callable[[Job], bool] | None = None

    def problems(self, job: Job) -> Iterator[Problem]:
        """The problems that the check finds."""
        if self.applies is not None and not self.applies(job):
            return iter(())
        module, _, name = self.place.partition(":")
        function = getattr(importlib.import_module(f"llmctl.submit.checks.{module}"), name)
        return cast("Callable[[Job], Iterator[Problem]]", function)(job)


CHECKS = (
    Check("site:site_problems"),
    Check("container:container_problems", _has_image),
    Check("hosts:host_problems", lambda job: job.backend.capabilities.starts_on_hosts),
    Check("spares:spare_problems", lambda job: job.spec.spare_nodes > 0),
    Check("chain:chain_problems", lambda job: job.spec.chain is not None),
    Check("config:config_problems", _trains),
    Check("memory:memory_problems", has_known_gpu),
    Check("site:place_problems"),
)
"""In the order of their messages, the most basic first. A new check is one line here and one function in checks/."""


def job_problems(job: Job) -> list[Problem]:
    """Problems of a job that need no contact with a machine. Pure."""
    return [problem for check in CHECKS for problem in check.problems(job)]


def leave_out(session: ClusterSession, job: Job, warnings: list[str], *, dry_run: bool, moves: bool = True) -> Job:
    """The job without the nodes of the user's list of bad nodes, which one round trip reads.

    A job of another machine with problems stays unchanged: not worth a connection.

    Args:
        session: of the cluster.
        job: with every value decided.
        warnings: gets a sentence on each listed node.
        dry_run: query no scheduler, and read no list of another machine.
        moves: False for a run that must stay on its hosts.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    if job.is_remote and (dry_run or job_problems(job)):
        return job
    listed = session.transport.read_bad_nodes(str(job.profile.runs_root))
    if not listed["entries"] and not listed["remarks"]:
        return job
    from llmctl.submit.bad_nodes.left_out import without_listed

    return without_listed(session, job, listed, warnings, dry_run=dry_run, moves=moves)


def check_job(
    session: ClusterSession,
    resolved: Resolved,
    job: Job,
    own_paths: Sequence[PathCheck],
    user_code: "UserCode | None" = None,
    *,
    dry_run: bool,
) -> list[str]:
    """Refuse a job with problems, reporting all of them at once; returns warnings.

    One round trip inspects all paths. Up to six more read parts of data and tokenizer, and three recognise other
    programs' checkpoints, where the config names them. Another machine is contacted only if the job has no other
    problem, and never for a dry run.

    Args:
        session: of the cluster.
        resolved: the job's values with their origins.
        job: with every value decided.
        own_paths: checks of the run's own paths.
        user_code: files of job.code, in which functions that the config names are looked up.
        dry_run: inspect no path of another machine.

    Raises:
        UsageError, ConfigFileError, ProfileError, RecordError: lists all problems; the first decides the class.
        SchedulerError: the machine cannot be reached.
    """
    transport = session.transport
    problems = [*job_problems(job), *_function_problems(job, user_code)]
    # Not worth a connection, which may ask for a password.
    if job.is_remote and problems:
        raise resolved.error(problems)
    root = _runs_root_path(job.profile, job.folders)
    paths = [*_named_paths(job), root, *own_paths]
    if dry_run and job.is_remote:
        unchecked = dict.fromkeys(path for check in paths for path in check.paths)
        return [*_warnings(job), f"not checked on {transport.host}: {', '.join(unchecked)}"]
    if job.is_remote:
        transport = transport_for(transport, job.request.hosts)
    if job.backend.capabilities.starts_on_hosts:
        from llmctl.submit.checks.hosts import check_hosts_answer

        check_hosts_answer(job, cast("HostGroup", session.transport))
    is_elsewhere = dry_run and job.queue is not None
    problems += _path_problems([path for path in paths if path is not root or not is_elsewhere], transport)
    found, notes = _content_problems(job, transport, told={problem.key for problem in problems})
    problems += found
    if problems:
        raise resolved.error(problems)
    warnings = [*_warnings(job), *notes]
    if is_elsewhere:  # this machine may not be the login node
        warnings += [problem.text for problem in _path_problems([root], transport)]
    return warnings


def _function_problems(job: Job, user_code: "UserCode | None") -> Iterator[Problem]:
    if job.config is None or user_code is None:
        return iter(())
    from llmctl.submit.checks.user_functions import function_problems

    return function_problems(job.config, {name: path for path, name in user_code.files})


def _named_paths(job: Job) -> list[PathCheck]:
    if job.config is None and job.request.container is None:
        return []
    from llmctl.submit.checks.config import named_paths

    return list(named_paths(job))


def check_runs_root(profile: "ClusterProfile", context: Context) -> None:
    """Refuse a folder for the runs that cannot be created or written.

    Raises:
        ProfileError: names the folder, the obstacle, and the file or variable that sets the folder.
        SchedulerError: the machine cannot be reached.
    """
    problems = runs_root_name_problems(profile, context.folders)
    if not problems:
        problems = _path_problems([_runs_root_path(profile, context.folders)], context.connect(profile))
    if problems:
        raise profile_error(context, profile, problems)


def _content_problems(job: Job, transport: Transport, told: Collection[str]) -> tuple[list[Problem], list[str]]:
    """Problems inside the files and folders of a training run, and warnings; ``told`` are keys with a problem."""
    problems: list[Problem] = []
    notes: list[str] = []
    config = job.config
    if config is None:
        return problems, notes
    data = config.data
    if data.data_path or data.train_data_path or data.tokenizer_model or data.vocab_file:
        from llmctl.submit.checks.contents import data_problems

        problems, notes = data_problems(job, config, transport)
    if config.checkpoint.load is not None or config.checkpoint.save is not None:
        from llmctl.submit.checks.foreign import start_problems

        found, more = start_problems(job, transport)
        if not found and not more and config.checkpoint.load is not None:
            from llmctl.submit.checks.contents import weight_problems

            found = weight_problems(job, config, transport)
        problems += [problem for problem in found if problem.key not in told]
        notes += more
    if config.evaluation.tasks and "evaluation.tasks" not in told:
        from llmctl.submit.checks.config import task_file_problems

        problems += task_file_problems(job, transport)
    return problems, notes


def _warnings(job: Job) -> list[str]:
    """Warnings about a job without problems."""
    warnings: list[str] = []
    if job.config is not None:
        from llmctl.submit.checks.config import generated_data_warnings

        warnings += generated_data_warnings(job.config)
    if job.spec.env:
        from llmctl.submit.checks.site import literal_warnings

        warnings += literal_warnings(job)
    if job.backend.capabilities.starts_in_place:
        from llmctl.submit.checks.site import crowd_warnings

        warnings += crowd_warnings(job, os.cpu_count() or 1)
    if job.profile.container.runtime is not None and job.image is None:
        from llmctl.submit.checks.container import bare_warnings

        warnings += bare_warnings(job)
    if has_known_gpu(job):
        from llmctl.submit.checks.memory import memory_warnings

        warnings += memory_warnings(job)
    return warnings


def _path_problems(checks: Sequence[PathCheck], transport: Transport) -> list[Problem]:
    """Inspect all paths in one round trip; returns problems in the order of the checks."""
    paths = list(dict.fromkeys([path for check in checks for path in check.paths]))
    facts = dict(zip(paths, transport.stat_paths(paths), strict=True))
    return [problem for check in checks if (problem := check.judge(facts)) is not None]


def _runs_root_path(profile: "ClusterProfile", folders: "UserFolders") -> PathCheck:
    """Check that the folder of the runs can be created and written."""
    root = profile.runs_root or ""

    def judge(facts: "Mapping[str, PathFacts]") -> Problem | None:
        why = facts[root].why_unwritable(root)
        return runs_root_problem(profile, folders, why) if why else None

    return PathCheck((root,), judge)
