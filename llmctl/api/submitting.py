"""``submit`` and ``dry_run``: a run on a cluster, and its plan before anything is submitted."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from llmctl.api.call import Answer, Call, calling, plain
from llmctl.api.running import Run
from llmctl.operate.submission import dry_run_document
from llmctl.submit.execute import execute_plan
from llmctl.submit.job import SubmitArguments
from llmctl.submit.plan import example_not_named, notes_beforehand, plan_submission, unnamed_example

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class DryRun:
    """The plan of a run that has passed every check. Nothing was written or submitted.

    Attributes:
        run_id: of this plan; a submission makes its own, unless ``run_id`` is given.
        name: of the run.
        cluster: name of the profile.
        run_dir: directory that the run would have, on the cluster's machine.
        script: text of job.sh.
        commands: words of each command that would submit the job.
        messages: warnings and remarks.
        document: all of it as plain values: what ``llmctl submit --dry-run --json`` prints.
    """

    run_id: str
    name: str
    cluster: str
    run_dir: Path
    script: str
    commands: tuple[tuple[str, ...], ...]
    messages: tuple[str, ...]
    document: Mapping[str, Any]


def submit(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    example: bool = False,
    hf: str | os.PathLike[str] | None = None,
    data: Sequence[str] = (),
    command: Sequence[str] = (),
    torchrun: bool = False,
    set: Mapping[str, Any] | None = None,
    script_arguments: Mapping[str, str] | None = None,
    cluster: str | None = None,
    resource_type: str | None = None,
    queue: str | None = None,
    group: str | None = None,
    reservation: str | None = None,
    exclude: str | Sequence[str] | None = None,
    priority: int | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    time: str | None = None,
    after: str | None = None,
    max_restarts: int | None = None,
    restart_on: str | Sequence[str] | None = None,
    spare_nodes: int | None = None,
    hang_timeout_s: int | None = None,
    preflight: str | None = None,
    chain: str | Mapping[str, float] | None = None,
    container: str | None = None,
    mounts: Sequence[str] | None = None,
    launcher: str | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    installed: bool = False,
    template: str | os.PathLike[str] | None = None,
    name: str | None = None,
    run_id: str | None = None,
    notify: Sequence[str] | None = None,
    notify_on: str | Sequence[str] | None = None,
    answer: Answer | None = None,
) -> Run:
    """Start a training run, or any command, on a cluster, as ``llmctl submit`` does.

    Reads files, contacts the cluster, writes the run directory there, and submits the job. Returns once the scheduler
    has accepted the job. Warnings and remarks are in ``messages`` of the run.

    Args:
        config: training config or Megatron-LM script; or the config itself, section by section, whose relative paths
            are below the working directory. None: ``./llmctl.yaml``, else the bundled example.
        example: train a small bundled example on generated data, in place of ``config``.
        hf: continue the pretraining of this Hugging Face folder or GGUF file on ``data``.
        data: with ``hf``: .jsonl, .parquet or text files.
        command: words of a command that runs on every node instead of the trainer.
        torchrun: start ``command``, a Python program, in every rank.
        set: values by dotted key, laid over the config, such as ``{"training.train_iters": 100}``.
        script_arguments: variables that a Megatron-LM script leaves open.
        cluster: name of the profile. None: as for the command.
        resource_type: kind of node.
        queue: queue or partition.
        group: group, project or account to bill.
        reservation: reservation of nodes.
        exclude: nodes to leave out.
        priority: in the scheduler's numbers.
        nodes: number of nodes.
        gpus_per_node: ranks per node. None: the node's GPUs.
        time: time limit, such as ``1:30:00`` or ``90m``.
        after: start when this run completes; ``any:RUN``: when the run ends.
        max_restarts: how often a failed attempt begins again in the same job.
        restart_on: of killed, lost_peer, hang, node, not_finite, roll_back, out_of_memory, error, unknown.
        spare_nodes: further nodes, which replace nodes at fault when an attempt begins again.
        hang_timeout_s: seconds for which a hang lasts before the attempt ends; 0: for ever.
        preflight: ``quick``: check all nodes before the model is built; ``off``: not.
        chain: each job submits the next one, up to ``until`` (iterations), ``points`` or ``node_hours`` of all jobs.
        container: image.
        mounts: ``SRC:DST`` of folders to mount in the container.
        launcher: ``torchrun``, ``srun`` or ``mpirun``.
        env: variables for the job; their values are in the script.
        secrets: names of variables whose values stay out of script and record.
        installed: use the trainer installed in the environment, not a snapshot of llmctl's.
        template: template of job.sh.
        name: of the run.
        run_id: None: a new one.
        notify: places that are told of the end: https://URL, mailto:USER, secret:NAME, command:PROGRAM.
        notify_on: of begin, end, fail, hang, restart.
        answer: answers questions of ssh, such as for a password. Without one, what needs an answer fails.

    Raises:
        UsageError, ConfigFileError, ProfileError: all problems, by flag, file and key, or profile.
        SchedulerError: the cluster cannot be reached, or did not accept the job.
        RecordError: the run exists already, or its record cannot be written.
    """
    given = dict(locals())
    with calling("llmctl.submit", *_named(config), answer=answer) as call:
        arguments = _arguments(given, dry_run=False)
        plan = plan_submission(call.context, arguments)
        job = unnamed_example(plan, call.context, arguments)
        if job:
            raise example_not_named(job)
        _tell(call, notes_beforehand(plan, call.context, has_page=False))
        record = execute_plan(plan, call.context)
        return Run.of(call.context.index.find(record.run_id), call.messages, answer)


def _with_parameters_of(model: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the parameters of another; it gets them by name, all of them, as one mapping."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        signature = inspect.signature(model)

        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return function(bound.arguments)

        returns = inspect.signature(function).return_annotation
        wrapper.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        return wrapper

    return decorate


@_with_parameters_of(submit)
def dry_run(given: Mapping[str, Any]) -> DryRun:
    """Plan a run as ``submit --dry-run`` does, with all checks of files of this machine; takes what ``submit`` takes.

    Contacts no other machine and no scheduler, and writes nothing.

    Raises:
        UsageError, ConfigFileError, ProfileError: all problems, by flag, file and key, or profile.
    """
    with calling("llmctl.dry_run", *_named(given["config"])) as call:
        plan = plan_submission(call.context, _arguments(given, dry_run=True))
        _tell(call, notes_beforehand(plan, call.context, has_page=False))
        record = plan.record
        return DryRun(
            run_id=record.run_id,
            name=record.name,
            cluster=record.cluster,
            run_dir=record.run_dir,
            script=plan.rendered.script,
            commands=tuple(tuple(command.argv) for command in plan.rendered.commands),
            document=dry_run_document(plan, call.context, None),
            messages=tuple(call.messages),
        )


def _tell(call: Call, notes: Sequence[str]) -> None:
    for note in notes:
        call.context.tell(note)


def _named(config: Any) -> tuple[str, ...]:
    """The config's file, for the record of the run; a mapping is in the record itself."""
    return (os.fspath(config),) if isinstance(config, (str, os.PathLike)) else ()


def _arguments(given: Mapping[str, Any], *, dry_run: bool) -> SubmitArguments:
    config, hf, template = given["config"], given["hf"], given["template"]
    return SubmitArguments(
        config=plain(config),
        job={**given, "mounts": _words(given["mounts"]), "notify": _words(given["notify"])},
        cluster=given["cluster"],
        settings=plain(given["set"] or {}),
        env=_pairs(given["env"]),
        secrets=_words(given["secrets"]) or (),
        after=given["after"],
        command=_words(given["command"]) or (),
        run_id=given["run_id"],
        installed=given["installed"],
        dry_run=dry_run,
        template=None if template is None else os.fspath(template),
        script_arguments=_pairs(given["script_arguments"]),
        hf=None if hf is None else os.fspath(hf),
        data=_words(given["data"]) or (),
        example=given["example"],
        torchrun=given["torchrun"],
    )


def _words(value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Words of a list; one text is one word."""
    return None if value is None else (value,) if isinstance(value, str) else tuple(map(os.fspath, value))


def _pairs(values: Mapping[str, str] | None) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in (values or {}).items())
