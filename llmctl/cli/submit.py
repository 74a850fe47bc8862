"""``llmctl submit``: start a run on a cluster. Shows and carries out the plans of other commands too."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from llmctl.cli.completion import complete_cluster, complete_run
from llmctl.cli.plan_page import note_lines, plan_lines
from llmctl.context import Context
from llmctl.errors import UsageError

if TYPE_CHECKING:
    from llmctl.operate.submission import Resumed
    from llmctl.runs.record import RunRecord
    from llmctl.submit.job import SubmitArguments, SubmitPlan

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def _option(panel: str, flag: str, metavar: str, description: str, **more: Any) -> Any:
    return typer.Option(None, flag, metavar=metavar, help=description, rich_help_panel=panel, **more)


def _switch(panel: str, flag: str, description: str) -> Any:
    return typer.Option(False, flag, help=description, rich_help_panel=panel)


_CONFIG = typer.Argument(
    None,
    metavar="CONFIG",
    help="Training config, or a Megatron-LM script (.sh). Default: ./llmctl.yaml, else --example.",
)
# Panels of --help.
_WHAT = "What runs"
_WHERE = "Where"
_SIZE = "How many and how long"
_ENVIRONMENT = "Environment"
_OUTPUT = "Run and output"

_EXAMPLE = _switch(_WHAT, "--example", "Train a small bundled example on generated data, in place of CONFIG.")
_HF = _option(_WHAT, "--hf", "FOLDER", "Continue the pretraining of this Hugging Face folder or GGUF file on --data.")
_DATA = _option(_WHAT, "--data", "TEXT", "With --hf: .jsonl, .parquet or text files; text is cut at blank lines.")
_SETTINGS = _option(_WHAT, "--set", "KEY=VALUE", "Set a key of the config; the value is YAML. Repeatable.")
_SCRIPT_ARGUMENTS = _option(
    _WHAT,
    "--arg",
    "NAME=VALUE",
    "Variable that a script leaves open; 1=VALUE is $1, vocab-file=VALUE that flag. Repeatable.",
)
_TORCHRUN = _switch(
    _WHAT, "--torchrun", "COMMAND is script.py ARGS or -m MODULE ARGS: torchrun starts it in every rank."
)

_CLUSTER = _option(_WHERE, "--cluster", "NAME", "Cluster. Default: local.", autocompletion=complete_cluster)
_RESOURCE_TYPE = _option(_WHERE, "--resource-type", "TYPE", "Kind of node.")
_QUEUE = _option(_WHERE, "--queue", "QUEUE", "Queue or partition.")
_GROUP = _option(_WHERE, "--group", "GROUP", "Group, project or account to bill.")
_RESERVATION = _option(_WHERE, "--reservation", "ID", "Reservation of nodes.")
_EXCLUDE = _option(_WHERE, "--exclude", "HOST[,HOST]", "Nodes to leave out.")
_PRIORITY = _option(_WHERE, "--priority", "N", "Priority, in the scheduler's numbers.")

_NODES = _option(_SIZE, "--nodes", "N", "Number of nodes.")
_GPUS_PER_NODE = _option(_SIZE, "--gpus-per-node", "N", "Ranks per node. Default: the node's GPUs.")
_TIME = _option(_SIZE, "--time", "H:M:S", "Time limit; 90m, 5h and 1h30m too.")
_AFTER = _option(
    _SIZE, "--after", "RUN", "Start when this run completes; any:RUN: when it ends.", autocompletion=complete_run
)

_MAX_RESTARTS = _option(
    _SIZE, "--max-restarts", "N", "How often a failed attempt begins again in the same job. Default: 0."
)
_RESTART_ON = _option(
    _SIZE,
    "--restart-on",
    "CLASS[,CLASS]",
    "Of killed,lost_peer,hang,node,not_finite,out_of_memory,error,unknown. Default: all but not_finite.",
)
_SPARE_NODES = _option(
    _SIZE, "--spare-nodes", "N", "Further nodes, which replace nodes at fault when an attempt begins again. Default: 0."
)
_HANG_TIMEOUT = _option(
    _SIZE, "--hang-timeout", "SECONDS", "End an attempt whose hang lasts for so long. Default: 300. 0: never."
)
_PREFLIGHT = _option(
    _SIZE, "--preflight", "off|quick", "quick: check all nodes before the model is built. Default: off."
)
_CHAIN = _option(
    _SIZE,
    "--chain",
    "until=N,points=P,node_hours=H",
    "Each job submits the run's next one, up to the iteration or what all may use; at least one of the three.",
)

_CONTAINER = _option(_ENVIRONMENT, "--container", "IMAGE", "Container image.")
_MOUNTS = _option(_ENVIRONMENT, "--mount", "SRC:DST", "Folder to mount in the container. Repeatable.")
_LAUNCHER = _option(_ENVIRONMENT, "--launcher", "torchrun|srun|mpirun", "Launcher of the ranks.")
_ENV = _option(_ENVIRONMENT, "--env", "NAME=VALUE", "Variable for the job. Repeatable.")
_SECRETS = _option(_ENVIRONMENT, "--secret", "NAME", "Variable whose value stays out of script and record. Repeatable.")
_INSTALLED = _switch(
    _ENVIRONMENT, "--installed", "Use the trainer installed in the environment, not a snapshot of llmctl's."
)
_TEMPLATE = _option(_ENVIRONMENT, "--template", "FILE", "Template of job.sh. Default: the scheduler's template.")

_NAME = _option(_OUTPUT, "--name", "NAME", "Name of the run.")
_NOTIFY = _option(
    _OUTPUT,
    "--notify",
    "WHERE",
    "Whom to tell of the end: https://URL, mailto:USER, secret:NAME, command:PROGRAM. Repeatable.",
)
_NOTIFY_ON = _option(_OUTPUT, "--notify-on", "EVENT[,EVENT]", "Of begin,end,fail,hang,restart. Default: all but begin.")
_RUN_ID = _option(_OUTPUT, "--run-id", "ID", "Run id. Default: a new one.")
_DRY_RUN = _switch(_OUTPUT, "--dry-run", "Show the plan of the run; submit nothing.")
_SHOW_SCRIPT = _switch(_OUTPUT, "--show-script", "Print script and submit command; submit nothing.")
_FOLLOW = _switch(_OUTPUT, "--follow", "Follow the run until it ends.")
_JSON = _switch(_OUTPUT, "--json", "Print one JSON document.")


@app.command(
    epilog="llmctl submit [OPTIONS] -- COMMAND [ARGS] runs COMMAND once on every node instead of the trainer.",
    context_settings={"allow_extra_args": True},
)
def submit(
    ctx: typer.Context,
    config: str | None = _CONFIG,
    example: bool = _EXAMPLE,
    hf: str | None = _HF,
    data: list[str] | None = _DATA,
    settings: list[str] | None = _SETTINGS,
    script_arguments: list[str] | None = _SCRIPT_ARGUMENTS,
    torchrun: bool = _TORCHRUN,
    cluster: str | None = _CLUSTER,
    resource_type: str | None = _RESOURCE_TYPE,
    queue: str | None = _QUEUE,
    group: str | None = _GROUP,
    reservation: str | None = _RESERVATION,
    exclude: str | None = _EXCLUDE,
    priority: int | None = _PRIORITY,
    nodes: int | None = _NODES,
    gpus_per_node: int | None = _GPUS_PER_NODE,
    time: str | None = _TIME,
    after: str | None = _AFTER,
    max_restarts: int | None = _MAX_RESTARTS,
    restart_on: str | None = _RESTART_ON,
    spare_nodes: int | None = _SPARE_NODES,
    hang_timeout_s: int | None = _HANG_TIMEOUT,
    preflight: str | None = _PREFLIGHT,
    chain: str | None = _CHAIN,
    container: str | None = _CONTAINER,
    mounts: list[str] | None = _MOUNTS,
    launcher: str | None = _LAUNCHER,
    env: list[str] | None = _ENV,
    secrets: list[str] | None = _SECRETS,
    installed: bool = _INSTALLED,
    template: str | None = _TEMPLATE,
    name: str | None = _NAME,
    run_id: str | None = _RUN_ID,
    notify: list[str] | None = _NOTIFY,
    notify_on: str | None = _NOTIFY_ON,
    dry_run: bool = _DRY_RUN,
    show_script: bool = _SHOW_SCRIPT,
    follow: bool = _FOLLOW,
    as_json: bool = _JSON,
) -> int:
    """Start a training run, or any command, on a cluster."""
    given: dict[str, Any] = dict(locals())
    from llmctl.submit.plan import plan_submission

    context: Context = ctx.obj
    arguments = _arguments(given, ctx.args, context.command)
    plan = plan_submission(context, arguments)
    if arguments.config is None and not context.command:
        _check_that_the_example_is_meant(plan, context, arguments)
    return submit_plan(plan, context, Display(dry_run=dry_run, script=show_script, as_json=as_json, follow=follow))


def _arguments(given: Mapping[str, Any], more: list[str], command: tuple[str, ...]) -> "SubmitArguments":
    """The command line of a submission.

    Args:
        given: parameters of ``submit``.
        more: words after CONFIG.
        command: words of COMMAND.
    """
    from llmctl.submit.job import SubmitArguments

    config, texts = _divide_words(given["config"], more, given["data"] or [])
    return SubmitArguments(
        config=config,
        job=given,
        cluster=given["cluster"],
        settings=tuple(given["settings"] or ()),
        env=tuple(given["env"] or ()),
        secrets=tuple(given["secrets"] or ()),
        after=given["after"],
        command=command,
        run_id=given["run_id"],
        installed=given["installed"],
        dry_run=given["dry_run"] or given["show_script"],
        template=given["template"],
        script_arguments=tuple(given["script_arguments"] or ()),
        hf=given["hf"],
        data=tuple(texts),
        example=given["example"],
        torchrun=given["torchrun"],
    )


def _check_that_the_example_is_meant(plan: "SubmitPlan", context: Context, arguments: "SubmitArguments") -> None:
    """Ask before a queue, which may bill, gets the bundled example that nobody has named.

    Raises:
        UsageError: the answer is no, or nobody can answer.
    """
    from llmctl.submit.plan import example_not_named, unnamed_example

    job = unnamed_example(plan, context, arguments)
    if not job:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise example_not_named(job)
    if not typer.confirm(f"train the bundled example on {job}?", err=True):
        raise UsageError("nothing was submitted; name a config, or give --example for the bundled example")


def _divide_words(config: str | None, more: list[str], data: list[str]) -> tuple[str | None, list[str]]:
    """CONFIG, and the texts of --data, to which a shell's pattern adds words without a flag."""
    if data:
        return None, [*data, *([] if config is None else [config]), *more]
    # Of a Python script with its arguments, the plan says how to start it.
    if more and not (config or "").endswith(".py"):
        raise UsageError(f"{more[0]}: is one word too many; the only argument is CONFIG")
    return config, []


@dataclass(frozen=True)
class Display:
    """The flags by which a plan is shown or carried out.

    Attributes:
        dry_run: show the plan, submit nothing.
        script: print the script and the submit commands instead, submit nothing.
        as_json: print one JSON document on standard output.
        follow: follow the run until it ends.
        more: further fields of the document.
    """

    dry_run: bool = False
    script: bool = False
    as_json: bool = False
    follow: bool = False
    more: "Resumed | None" = None


def submit_plan(plan: "SubmitPlan", context: Context, display: Display) -> int:
    """Show or carry out a plan as the flags say; returns the exit code."""
    if display.dry_run or display.script:
        show_plan(plan, context, display)
        return 0
    record = carry_out(plan, context, display)
    return follow_started(record, context, as_json=display.as_json) if display.follow else 0


def show_plan(plan: "SubmitPlan", context: Context, display: Display) -> None:
    """``--dry-run`` and ``--show-script``. Writes nothing. The script is printed byte for byte."""
    if display.as_json:
        from llmctl.cli.console import print_json
        from llmctl.operate.submission import dry_run_document

        _tell_beforehand(plan, context, has_page=False)
        print_json(dry_run_document(plan, context, display.more))
    elif display.script:
        _tell_beforehand(plan, context, has_page=False)
        sys.stdout.flush()
        sys.stdout.buffer.write(plan.rendered.as_bytes())
    else:
        print("\n".join(plan_lines(plan, context, asks=False)))
        sys.stdout.flush()
        _tell_beforehand(plan, context, has_page=True)
        context.tell("nothing was submitted; --show-script prints the job script")


def carry_out(plan: "SubmitPlan", context: Context, display: Display) -> "RunRecord":
    """Submit and report; returns the record with the new submission."""
    from llmctl.submit.execute import execute_plan

    has_page = plan.job.config is not None and not display.as_json
    if has_page:
        context.tell("\n".join(plan_lines(plan, context, asks=True)))
    _tell_beforehand(plan, context, has_page=has_page)
    record = execute_plan(plan, context)
    if display.as_json:
        from llmctl.cli.console import print_json
        from llmctl.operate.submission import submitted_document

        print_json(submitted_document(record, plan, context, display.more))
        sys.stdout.flush()
        return record
    jobs = ", ".join(dict.fromkeys(job.job_id for job in record.submissions[-1].jobs))
    queue = f" in queue {plan.job.request.queue}" if plan.job.request.queue else ""
    how = f"job {jobs}{queue} on {record.cluster}" if plan.job.queue is not None else f"started on {record.cluster}"
    if not display.follow:
        print(record.run_id)
        context.tell(f"{how}: {record.run_dir}\nllmctl logs -f {record.run_id}")
    elif plan.job.queue is not None:
        context.tell(f"{record.run_id}: {how}")
    return record


def follow_started(record: "RunRecord", context: Context, *, as_json: bool) -> int:
    """Follow the run until it ends; returns the exit code.

    Args:
        record: the run's record.
        context: this call of llmctl.
        as_json: standard output holds a document, so the followed log goes to standard error.
    """
    from llmctl.context import ClusterSession
    from llmctl.operate.follow import follow_run
    from llmctl.operate.follow_output import PlainOutput

    session = ClusterSession.of(context, record.cluster, f"run {record.run_id}")
    output = PlainOutput(sys.stderr) if as_json else None
    return follow_run(record, session.transport, backend=session.backend, output=output)


def _tell_beforehand(plan: "SubmitPlan", context: Context, *, has_page: bool) -> None:
    """Print the site message, warnings and cost, which a page of the plan has too, before the job is submitted."""
    from llmctl.submit.plan import notes_beforehand

    lines = notes_beforehand(plan, context, has_page=has_page)
    if lines:
        context.tell("\n".join(note_lines(lines, sys.stderr) if sys.stderr.isatty() else lines))
