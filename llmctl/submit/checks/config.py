"""Checks of a training config against its job, of the paths in the config, and of its task files."""

from collections.abc import Iterator, Mapping, Sequence

from llmctl.site.container import is_file, on_host
from llmctl.submit.checks.site import size_problems
from llmctl.submit.job import Job, PathCheck, Problem
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import PathFacts
from llmctl.transport.protocol import Transport
from trainer.config.errors import ConfigError
from trainer.config.paths.task_files import is_task_file, task_file_problem
from trainer.config.sections.checkpoint import START_REMEDY
from trainer.config.train_config import TrainConfig
from trainer.planning.checks import check_world_size

_DATASET = "name the prefix of an indexed dataset, which `llmctl data prepare` makes from text"
_TEXT = "prepare text with `llmctl data prepare` and name the prefix, or set data.streaming=true to read it as it is"
_ENDINGS = (".bin", ".idx")
_TEXT_ENDINGS = (".jsonl", ".json", ".ndjson", ".txt", ".parquet", ".gz", ".zst", ".bz2", ".xz")
_READ = "name an existing path, or leave it out"
_TASKS_KEY = "evaluation.tasks"
_TASKS_REMEDY = "name a task file of lm-evaluation-harness, or one of its tasks"


def config_problems(job: Job) -> Iterator[Problem]:
    """A layout, batch size or checkpoint folder of a training run that does not fit the job. Pure."""
    config = job.config
    if config is None:
        return
    if not any(size_problems(job)):  # else the number of ranks is not known
        yield from _layout_problems(config, job.spec.nodes, job.request.ranks_per_node)
    if not (job.profile.shared or job.spec.nodes == 1 or config.checkpoint.save is not None):
        yield Problem(
            "checkpoint.save",
            f"is unset: the hosts of {job.profile.name} share no runs_root (shared: false), but a "
            "checkpoint needs one shared folder; name a folder that all hosts see, or train on one node",
            also=("checkpoint.save", "job.nodes"),
        )
    data = config.data
    if not (data.data_path or data.train_data_path or data.mock_data or config.hooks.dataset_function):
        yield Problem(
            "data.data_path",
            "is unset: give the prefix of an indexed dataset, which `llmctl data prepare` makes from text, "
            "or set data.mock_data=true",
            also=("data.mock_data",),
        )
    for key, path in (*config.data_prefixes(), *config.read_paths(), *config.written_paths()):
        if not path.startswith("/"):
            text = "and the job runs on other machines; give a path there, beginning with / or ~/"
            yield Problem(key, f"{path} is relative, {text}")


def generated_data_warnings(config: TrainConfig) -> list[str]:
    """One line for a decoder on generated data without a tokenizer: such a run cannot continue a text."""
    data = config.data
    named = data.tokenizer_model or data.vocab_file or data.tokenizer_function
    if not data.mock_data or named or data.tokenizer_type == "NullTokenizer" or config.model.architecture != "decoder":
        return []
    return [
        "data.mock_data: generated data has no tokenizer, so `llmctl generate` refuses this run; "
        "`llmctl data prepare` makes data of text"
    ]


def named_paths(job: Job) -> Iterator[PathCheck]:
    """Checks of all paths that the user names.

    Data, tokenizer, checkpoint and image must exist; other folders must be writable.
    """
    if job.config is not None:
        yield from _config_paths(job, job.config)
    if job.request.container is not None and is_file(job.request.container.image):
        remedy = "name an existing file, or an image of a registry"
        yield _present("job.container", (job.request.container.image,), remedy, (), kinds=("file", "folder"))


def _config_paths(job: Job, config: TrainConfig) -> Iterator[PathCheck]:
    mounts = (*job.profile.container.mounts, *job.spec.mounts)
    for key, prefix in config.data_prefixes():
        if not config.data.streaming:
            yield _dataset(key, prefix, mounts)
        # The matches of a pattern are not checked.
        elif not set("*?[") & set(prefix):
            yield _present(key, (prefix,), "name a file or folder of text", mounts, kinds=("file", "folder"))
    for key, path in config.read_paths():
        remedy = START_REMEDY if key == "checkpoint.load" else _READ
        yield _present(key, (path,), remedy, mounts, kinds=("file", "folder"))
    for key, path in config.written_paths():
        yield _writable(key, path, mounts)


def _dataset(key: str, prefix: str, mounts: Sequence[str]) -> PathCheck:
    """Check that both files of a dataset exist; else name the prefix that was probably meant, or what to do with text.

    Args:
        key: of the config.
        prefix: of the dataset, inside the job's container.
        mounts: mounts of the job's container.
    """
    shorter = next((prefix.removesuffix(ending) for ending in _ENDINGS if prefix.endswith(ending)), prefix)
    near = [other for other in (shorter, f"{shorter}_text_document", f"{shorter}_text_sentence") if other != prefix]

    def place(other: str) -> str:
        return on_host(f"{other}.bin", mounts) or f"{other}.bin"

    files = {on_host(path, mounts) or path: path for path in (f"{prefix}.bin", f"{prefix}.idx")}

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        missing = next((path for where, path in files.items() if facts[where].kind != "file"), None)
        if missing is None:
            return None
        meant = next((other for other in near if facts[place(other)].kind == "file"), None)
        if meant is not None:
            return Problem(key, f"there is no {missing}; did you mean the prefix {meant}?")
        return Problem(key, f"there is no {missing}; {_TEXT if prefix.endswith(_TEXT_ENDINGS) else _DATASET}")

    return PathCheck((*files, *map(place, near)), judge)


def _present(key: str, paths: Sequence[str], remedy: str, mounts: Sequence[str], *, kinds: Sequence[str]) -> PathCheck:
    """Check that paths exist.

    Args:
        key: of the config.
        paths: paths inside the job's container.
        remedy: advice for a missing path.
        mounts: mounts of the job's container.
        kinds: ``file`` or ``folder``, or both.
    """
    places = {on_host(path, mounts) or path: path for path in paths}

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        missing = next((path for place, path in places.items() if facts[place].kind not in kinds), None)
        return None if missing is None else Problem(key, f"there is no {missing}; {remedy}")

    return PathCheck(tuple(places), judge)


def _writable(key: str, path: str, mounts: Sequence[str]) -> PathCheck:
    """Check that the job can write a folder, or create the folder with its parents."""
    place = on_host(path, mounts) or path

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        why = facts[place].why_unwritable(place)
        return Problem(key, f"{path} cannot be written: {why}; name another, or leave it out") if why else None

    return PathCheck((place,), judge)


def _layout_problems(config: TrainConfig, nodes: int, ranks_per_node: int) -> Iterator[Problem]:
    try:
        check_world_size(config, nodes * ranks_per_node)
    except ConfigError as error:
        size = f" (world size = {_count(nodes, 'node')} x {_count(ranks_per_node, 'rank')}; --nodes changes it)"
        also = (error.key, "job.nodes", "job.gpus_per_node")
        yield Problem(error.key, error.problem + size, also=also, between_keys=True)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def task_file_problems(job: Job, transport: Transport) -> list[Problem]:
    """Task files that cannot be read or are not tasks. One round trip if the config names task files, else none.

    Args:
        job: with every value decided.
        transport: to a machine that has the job's folders.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    files = [task for task in job.config.evaluation.tasks if is_task_file(task)] if job.config is not None else []
    if not files:
        return []
    mounts = (*job.profile.container.mounts, *job.spec.mounts)
    parts = transport.read_parts([FileRead(on_host(path, mounts) or path) for path in files])
    problems = []
    for path, part in zip(files, parts, strict=True):
        if part is None:
            problems.append(Problem(_TASKS_KEY, f"{path} cannot be read; give yourself permission, or {_TASKS_REMEDY}"))
        elif part.size <= len(part.data) and (problem := task_file_problem(part.data)) is not None:
            problems.append(Problem(_TASKS_KEY, f"{path} cannot be loaded: {problem}; {_TASKS_REMEDY}"))
    return problems
