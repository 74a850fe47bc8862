"""Tools about runs that do not exist yet: plan and dry run; and those that submit, resume and cancel."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from llmctl.api.planning import plan as predicted
from llmctl.api.running import Run
from llmctl.api.submitting import dry_run as planned
from llmctl.api.submitting import submit as submitted
from llmctl.errors import ConfigFileError, UsageError
from llmctl.mcp_server.reading import RunName
from llmctl.mcp_server.tool import Answer, Arguments, Tool
from trainer.config.errors import ConfigError
from trainer.config.yaml_file import parse_yaml

_SET = "Values by dotted key, laid over the config, such as {'training.train_iters': 100}."


class ConfigArguments(Arguments):
    """A config: a file, or its text."""

    config: str | None = Field(
        None, description="Path of the config. Unset, and without config_text: ./llmctl.yaml, else the bundled example."
    )
    config_text: str | None = Field(
        None,
        description="The config itself as YAML, in place of a file; relative paths are below the working directory.",
    )
    set: dict[str, Any] = Field({}, description=_SET)
    cluster: str | None = Field(None, description="Name of the cluster. Unset: the user's default.")
    nodes: int | None = Field(None, ge=1, description="Number of nodes. Unset: of the config.")
    gpus_per_node: int | None = Field(None, ge=1, description="Ranks per node.")

    def config_value(self) -> str | Mapping[str, Any] | None:
        """The config as the Python API takes it.

        Raises:
            UsageError, ConfigFileError: file and text are given; the text is not a mapping in YAML.
        """
        if self.config_text is None:
            return self.config
        if self.config is not None:
            raise UsageError("config_text: is a config itself; leave out config, or config_text")
        try:
            return parse_yaml(self.config_text)
        except ConfigError as error:
            raise ConfigFileError(f"config_text: {error.problem}") from None


class PlanArguments(ConfigArguments):
    """Arguments of ``llmctl plan``."""

    device: str | None = Field(None, description="A device by name, such as H100, instead of a cluster's.")


def plan(asked: PlanArguments) -> Answer:
    """The document of ``llmctl plan --json``."""
    given = asked.model_dump(exclude={"config", "config_text"})
    found = predicted(asked.config_value(), **given)
    gib = found.peak_memory_bytes / 2**30
    verdict = "tight" if found.tight else "fits"
    text = f"{verdict}: {gib:.1f} GiB on the fullest rank" if found.fits else f"does not fit: {found.why_not}"
    return Answer(text, found.as_json())


class JobArguments(ConfigArguments):
    """Arguments of ``llmctl submit``."""

    example: bool = Field(False, description="Train a small bundled example, in place of a config.")
    hf: str | None = Field(None, description="Continue the pretraining of this Hugging Face folder or GGUF file.")
    data: list[str] = Field([], description="With hf: .jsonl, .parquet or text files.")
    command: list[str] = Field([], description="Words of a command that runs on every node instead of the trainer.")
    torchrun: bool = Field(False, description="Start the command, a Python program, in every rank.")
    script_arguments: dict[str, str] = Field({}, description="Variables that a Megatron-LM script leaves open.")
    resource_type: str | None = Field(None, description="Kind of node.")
    queue: str | None = Field(None, description="Queue or partition.")
    group: str | None = Field(None, description="Group, project or account to bill.")
    reservation: str | None = Field(None, description="Reservation of nodes.")
    exclude: list[str] | None = Field(None, description="Nodes to leave out.")
    priority: int | None = Field(None, description="In the scheduler's numbers.")
    time: str | None = Field(None, description="Time limit, such as 1:30:00 or 90m.")
    after: str | None = Field(None, description="Start when this run completes; any:RUN: when it ends.")
    max_restarts: int | None = Field(None, description="How often a failed attempt begins again in the same job.")
    restart_on: list[str] | None = Field(None, description="Classes of failures after which it does.")
    spare_nodes: int | None = Field(None, description="Further nodes, for attempts after a node's fault.")
    hang_timeout_s: int | None = Field(None, description="Seconds of a hang that end an attempt; 0: never.")
    preflight: Literal["off", "quick"] | None = Field(None, description="quick: check all nodes before the training.")
    chain: dict[str, float] | None = Field(None, description="Each job submits the next: until, points, node_hours.")
    container: str | None = Field(None, description="Image.")
    mounts: list[str] | None = Field(None, description="SRC:DST of folders to mount in the container.")
    launcher: Literal["torchrun", "srun", "mpirun"] | None = Field(None, description="Starter of the ranks.")
    env: dict[str, str] = Field({}, description="Variables of the job; their values are in the script: no secrets.")
    secrets: list[str] = Field([], description="Names of variables whose values stay out of script and record.")
    installed: bool = Field(False, description="Use the trainer installed in the environment.")
    template: str | None = Field(None, description="Template of job.sh.")
    name: str | None = Field(None, description="Of the run.")
    run_id: str | None = Field(None, description="Unset: a new one.")
    notify: list[str] | None = Field(None, description="Places that are told of the end, such as mailto:USER.")
    notify_on: list[str] | None = Field(None, description="Of begin, end, fail, hang, restart.")

    def values(self) -> dict[str, Any]:
        """The arguments as the Python API takes them."""
        return {**self.model_dump(exclude={"config", "config_text"}), "config": self.config_value()}


def dry_run(asked: JobArguments) -> Answer:
    """The document of ``llmctl submit --dry-run --json``."""
    found = planned(**asked.values())
    return Answer(f"{found.name} on {found.cluster} passes all checks of this machine", found.document)


def submit(asked: JobArguments) -> Answer:
    """Submit a run."""
    run = submitted(**asked.values())
    return Answer(f"submitted {run.run_id} on {run.cluster}", _submission(run))


class ResumeArguments(Arguments):
    """Arguments of ``llmctl resume``."""

    run: RunName
    nodes: int | None = Field(None, ge=1, description="New number of nodes.")
    exclude: list[str] | None = Field(None, description="Nodes to leave out; empty: none. Unset: as before.")
    set: dict[str, Any] = Field({}, description=_SET)


def resume(asked: ResumeArguments) -> Answer:
    """Resume a run."""
    run = Run(asked.run).resume(nodes=asked.nodes, exclude=asked.exclude, set=asked.set)
    return Answer(f"resumed {run.run_id} on {run.cluster}", _submission(run))


def _submission(run: Run) -> dict[str, Any]:
    return {"run_id": run.run_id, "name": run.name, "cluster": run.cluster, "run_dir": str(run.run_dir)}


class CancelArguments(Arguments):
    """Arguments of ``llmctl cancel``."""

    run: RunName
    grace_s: float = Field(30, ge=0, le=600, description="Seconds to save before all processes are killed.")


def cancel(asked: CancelArguments) -> Answer:
    """Cancel a run."""
    done = Run(asked.run).cancel(grace=asked.grace_s)
    view = None if done.view is None else done.view.as_json()
    return Answer(done.sentence, {"sentence": done.sentence, "had_ended": done.had_ended, "run": view})


TOOLS = (
    Tool(
        "plan",
        "Predict memory, speed and cost of a training run on a cluster or a named device; fits says if it fits.",
        PlanArguments,
        plan,
    ),
    Tool(
        "dry_run",
        "Check a config and the whole submission, and show nodes, cost, folder and job script. Writes and submits "
        "nothing, contacts no other machine. Errors name the key and the cure.",
        JobArguments,
        dry_run,
    ),
)
WRITING_TOOLS = (
    Tool(
        "submit",
        "Start a training run, or any command, on a cluster. It takes nodes and may cost points: show the person the "
        "dry_run and ask first.",
        JobArguments,
        submit,
        writes=True,
    ),
    Tool(
        "resume",
        "Resume an ended run from its latest checkpoint. It takes nodes and may cost points: ask the person first.",
        ResumeArguments,
        resume,
        writes=True,
    ),
    Tool(
        "cancel",
        "End a run and all of its processes; the trainer saves first. Ask the person first.",
        CancelArguments,
        cancel,
        writes=True,
        destroys=True,
    ),
)
"""Only a server with ``--allow-submit`` has these."""
