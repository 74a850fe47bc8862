"""Start points without weights, and other programs' models at checkpoint.load and save, before a job is queued."""

from collections.abc import Sequence

from llmctl.site.container import on_host
from llmctl.submit.job import Job, Problem
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport
from trainer.config.foreign_formats import HUB_CONFIG, NATIVE_METADATA, ForeignFormat, Listing, format_of
from trainer.config.sections.checkpoint import START_REMEDY
from trainer.config.train_config import TrainConfig


def start_problems(job: Job, transport: Transport) -> tuple[list[Problem], list[str]]:
    """Folders to load or save that are of another program, or a start point that holds nothing; and notes.

    A Hugging Face folder can be loaded. Notes tell of a start from other weights than those of ``load``. Takes two
    round trips if the config names such a folder, with one more for a config.json and one for a start point without
    content; else none.

    Args:
        job: with every value decided.
        transport: to a machine that has the job's folders.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    if job.config is None:
        return [], []
    checkpoint, mounts = job.config.checkpoint, (*job.profile.container.mounts, *job.spec.mounts)
    named = {"load": checkpoint.load, "save": checkpoint.save}
    folders = {key: path for key, path in named.items() if path is not None}
    places = {key: on_host(path, mounts) or path for key, path in folders.items()}
    listings = dict(zip(folders, _listings([*places.values()], transport), strict=True))
    problems = []
    for key, path in folders.items():
        found = format_of(listings[key])
        if found is not None and key == "save":
            problems.append(Problem("checkpoint.save", f"{path} {found.problem_of_target}"))
        elif found is not None and found is not ForeignFormat.HUGGING_FACE:
            problems.append(Problem("checkpoint.load", f"{path} {found.problem}"))
    notes = []
    if checkpoint.load is not None and not problems:
        goes_on = job.submission == 1 and not job.config.continues_save and "save" in folders
        if goes_on and listings["save"].holds_checkpoints:
            notes.append(
                f"checkpoint.save: {checkpoint.save} holds checkpoints, so the run goes on from the latest of them and "
                f"leaves checkpoint.load, {checkpoint.load}, alone"
            )
        lack = _lack_of_start(listings["load"], places["load"], transport)
        if lack and job.config.continues_save and not checkpoint.exit_on_missing_checkpoint:
            notes.append(
                f"checkpoint.load: {checkpoint.load} {lack} yet, so the run starts with new weights; it is also "
                "checkpoint.save"
            )
        elif lack:
            problems.append(Problem("checkpoint.load", f"{checkpoint.load} {lack}; {_remedy(job.config)}"))
    return problems, notes


def _remedy(config: TrainConfig) -> str:
    if not config.continues_save:
        return START_REMEDY
    return (
        "checkpoint.exit_on_missing_checkpoint refuses new weights: correct the path, or set it to false to start with "
        "new weights"
    )


def _lack_of_start(load: Listing, place: str, transport: Transport) -> str:
    """The words for a start point without weights; empty if there are some."""
    if load.holds_checkpoints or format_of(load) is not None:
        return ""
    if NATIVE_METADATA in load.names:
        return "is a single checkpoint, not the folder that contains it"
    (facts,) = transport.stat_paths([place])
    if not facts.kind:
        return "does not exist"
    return "" if facts.kind == "file" else "holds no checkpoint"


def _listings(places: Sequence[str], transport: Transport) -> list[Listing]:
    if not places:
        return []
    names = transport.list_names(places)
    inner = [
        f"{place}/{name}" for place, own in zip(places, names, strict=True) for name in own if name.startswith("iter_")
    ]
    found = dict(zip(inner, transport.list_names(inner), strict=True)) if inner else {}
    configs = [f"{place}/{HUB_CONFIG}" if HUB_CONFIG in own else None for place, own in zip(places, names, strict=True)]
    wanted = [path for path in configs if path is not None]
    parts = dict(zip(wanted, transport.read_parts([FileRead(path) for path in wanted]), strict=True)) if wanted else {}
    listings = []
    for place, own, config in zip(places, names, configs, strict=True):
        part = parts.get(config) if config is not None else None
        iterations = {name: found[f"{place}/{name}"] for name in own if name.startswith("iter_")}
        listings.append(Listing(own, iterations, part.data.decode(errors="replace") if part is not None else ""))
    return listings
