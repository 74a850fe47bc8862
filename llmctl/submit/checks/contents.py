"""Checks of the data, the tokenizer and the first weights of a training run, by small parts of their files."""

from collections.abc import Sequence

from llmctl.site.container import on_host
from llmctl.submit.job import Job, Problem
from llmctl.submit.start_model import TransportFiles
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport
from trainer.config.errors import ConfigError
from trainer.config.foreign_formats import HUB_CONFIG
from trainer.config.train_config import TrainConfig
from trainer.planning.preflight.datasets import Part, Read, Reader, read_datasets, split_problems
from trainer.planning.preflight.published_weights import weights_problem
from trainer.planning.preflight.vocabulary import tokenizer_problems


def data_problems(job: Job, config: TrainConfig, transport: Transport) -> tuple[list[Problem], list[str]]:
    """Datasets and a tokenizer that the trainer would refuse; and sentences about splits that it goes on without.

    Takes two round trips for the datasets, and up to four for the tokenizer. Absent files are told by their paths.

    Args:
        job: with every value decided.
        config: of the job.
        transport: to a machine that has the job's files.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    mounts = (*job.profile.container.mounts, *job.spec.mounts)
    datasets = read_datasets(config, _reader(transport, mounts))
    found = [ConfigError(dataset.key, dataset.problem) for dataset in datasets if dataset.problem]
    found += tokenizer_problems(config, datasets, TransportFiles(transport, mounts))
    problems, notes = split_problems(config, datasets)
    return [Problem(error.key, error.problem) for error in (*found, *problems)], notes


def weight_problems(job: Job, config: TrainConfig, transport: Transport) -> list[Problem]:
    """Weights of a Hugging Face folder at checkpoint.load that cannot be read; none for another start.

    Takes up to four round trips, of which the last reads the headers of all files.

    Args:
        job: with every value decided.
        config: of the job.
        transport: to a machine that has the job's files.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    load = config.checkpoint.load
    mounts = (*job.profile.container.mounts, *job.spec.mounts)
    names = TransportFiles(transport, mounts).names(load) if load is not None else ()
    if load is None or HUB_CONFIG not in names:
        return []
    problem = weights_problem(load, names, _reader(transport, mounts))
    return [] if problem is None else [Problem("checkpoint.load", problem)]


def _reader(transport: Transport, mounts: Sequence[str]) -> Reader:
    def read(reads: Sequence[Read]) -> list[Part | None]:
        places = [FileRead(on_host(one.path, mounts) or one.path, one.offset, one.limit) for one in reads]
        return [None if part is None else Part(part.data, part.size) for part in transport.read_parts(places)]

    return read
