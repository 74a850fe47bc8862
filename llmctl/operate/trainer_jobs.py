"""Work of the trainer's other commands: on this machine, or as a job on a cluster's nodes."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.backends import capabilities_of
from llmctl.context import Context, is_remote
from llmctl.errors import UsageError
from llmctl.operate.trainer_command import finding_modules, run_trainer_command
from llmctl.submit.decide import job_python
from llmctl.submit.job import Flag, SubmitArguments, SubmitPlan
from llmctl.submit.plan import plan_submission

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile

# The folder of the trainer, not -m: the working directory or PYTHONPATH may have another package trainer.
# Jobs without GPUs set glibc's malloc for training. An encoding process with these settings would never free memory.
_PROGRAM = (
    'unset MALLOC_MMAP_MAX_ MALLOC_TRIM_THRESHOLD_ MALLOC_TOP_PAD_\nexec "$0" "$LLMCTL_RUN_DIR/code/trainer" {} "$@"'
)
_RESTART = "--restart"
# A requeued or resumed job continues the work of its first attempt, so only the first attempt restarts.
_AT_FIRST = f'if [[ $LLMCTL_ATTEMPT == 1 ]]; then set -- {_RESTART} "$@"; fi\n'
_NODES = ' --nodes "$NNODES" --node "$NODE_RANK" --attempt "$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT"'


@dataclass(frozen=True)
class TrainerWork:
    """A command of ``python -m trainer``.

    Attributes:
        command: words of the command; the last one is also the default name of its job.
        words: the command's flags; with a leading --check, the command only checks its input.
        paths: paths in ``words``.
        by_nodes: True if several nodes can share the work.
        on_cpu: True if the work has no use for GPUs.
        modules: folder of the user's modules that the work imports; None without such modules.
    """

    command: tuple[str, ...]
    words: tuple[str, ...]
    paths: tuple[str, ...]
    by_nodes: bool = False
    on_cpu: bool = False
    modules: Path | None = None

    def job_command(self, python: str) -> tuple[str, ...]:
        """The command that a job runs on each node, with the job's Python."""
        program = _PROGRAM.format(" ".join(self.command) + _NODES * self.by_nodes)
        if _RESTART in self.words:
            program = _AT_FIRST + program
        words = ("bash", "-c", program, python, *(word for word in self.words if word != _RESTART))
        return words if self.modules is None else (*finding_modules(self.modules), *words)


def plan_trainer_work(
    context: Context, cluster: str | None, work: TrainerWork, flags: Sequence[Flag], *, dry_run: bool
) -> SubmitPlan | int:
    """Plan the job for ``work``, or do the work at once; returns the plan or the exit code.

    On this machine, one node needs no job: the work is done at once. Before a job, the input is checked on the machine
    that submits. Jobs in containers are not checked, because their Python does not run there.

    Args:
        context: this call of llmctl.
        cluster: as typed; None without --cluster.
        work: the work.
        flags: flags of the job.
        dry_run: run nothing, and read nothing on another machine.

    Raises:
        LlmctlError: the job cannot be submitted, or the trainer cannot be started.
    """
    profile = context.profile(*context.cluster(cluster))
    given = {flag.key: flag.value for flag in flags}
    nodes = int(given.get("job.nodes", 1))
    if capabilities_of(profile.scheduler).starts_in_place and nodes == 1 and not dry_run:
        return run_trainer_command(context, profile, [*work.command, *work.words], work.modules)
    _check(profile, nodes, work)
    in_container = "job.container" in given or profile.environment.kind == "container"
    if not dry_run and not in_container:
        # Bad input is told now, not after a wait in the queue.
        code = run_trainer_command(context, profile, [*work.command, "--check", *work.words], work.modules)
        if code:
            return code
    own = "python3" if is_remote(profile) else sys.executable
    python = job_python(profile, context.folders, own, in_container=in_container)
    arguments = SubmitArguments(
        config=None,
        cluster=cluster,
        flags=tuple(_with_defaults(flags, profile, nodes, work)),
        command=work.job_command(python),
        dry_run=dry_run,
    )
    return plan_submission(context, arguments)


def _check(profile: "ClusterProfile", nodes: int, work: TrainerWork) -> None:
    relative = next((path for path in work.paths if not path.startswith(("/", "~/"))), None)
    if is_remote(profile) and relative is not None:
        raise UsageError(f"{relative}: paths on the machines of {profile.name} must begin with / or ~/")
    if nodes > 1 and not profile.shared:
        raise UsageError(
            f"--nodes {nodes}: all nodes must see the output, and the hosts of {profile.name} share no files "
            "(shared: false); use one node"
        )
    if nodes > 1 and _RESTART in work.words:
        raise UsageError("--restart: several nodes would discard each other's work; remove PREFIX.preparing instead")


def _with_defaults(flags: Sequence[Flag], profile: "ClusterProfile", nodes: int, work: TrainerWork) -> list[Flag]:
    keys = {flag.key for flag in flags}
    more = [] if "job.name" in keys else [Flag("--name", "job.name", work.command[-1])]
    kinds = profile.resource_types.items()
    on_cpu = [name for name, kind in kinds if not kind.gpus and (kind.max_nodes or nodes) >= nodes]
    if work.on_cpu and on_cpu and not keys & {"job.resource_type", "job.queue"}:
        more.append(Flag("--resource-type", "job.resource_type", on_cpu[0]))
    return [*flags, *more]
