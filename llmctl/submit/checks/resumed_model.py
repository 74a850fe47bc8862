"""Check of a resume's new model section against the run's own checkpoints, before the job is queued."""

from collections.abc import Sequence

from llmctl.submit.job import Flag, Job, Problem
from llmctl.submit.start_model import TransportFiles
from llmctl.transport.protocol import Transport
from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.start_model import named_model, other_model


def resumed_model_problems(job: Job, config: TrainConfig, flags: Sequence[Flag], transport: Transport) -> list[Problem]:
    """Flags that make another model than that of the run's latest checkpoint.

    Takes a few round trips. A damaged checkpoint is left to the
    trainer, which takes an earlier one.

    Args:
        job: with every value decided.
        config: of the job.
        flags: of this resume.
        transport: to a machine that has the job's folders.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    named = {flag.key.removeprefix("model.") for flag in flags if flag.key.startswith("model.")}
    files = TransportFiles(transport, (*job.profile.container.mounts, *job.spec.mounts))
    try:
        stored = named_model("checkpoint.save", config.checkpoint.save or str(job.run_dir / "checkpoints"), files)
    except ConfigError:
        return []
    if stored is None:
        return []
    ours = {key: value for key, value in config.model.model_dump().items() if key in named}
    text = "a run continues with the model of its checkpoints; for another model submit a new run"
    return [Problem(error.key, f"{error.problem}: {text}") for error in other_model(stored, ours, ())]
