"""Recognition of other programs' models at checkpoint.load and checkpoint.save, before a job is queued."""

from collections.abc import Sequence

from llmctl.site.container import on_host
from llmctl.submit.job import Job, Problem
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport
from trainer.config.foreign_formats import HUB_CONFIG, ForeignFormat, Listing, format_of


def foreign_problems(job: Job, transport: Transport) -> list[Problem]:
    """A folder to load or save that is of another program; a Hugging Face folder can be loaded.

    Takes two round trips if the config names such a folder, with one more for a config.json; else none.

    Args:
        job: with every value decided.
        transport: to a machine that has the job's folders.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    if job.config is None:
        return []
    checkpoint, mounts = job.config.checkpoint, (*job.profile.container.mounts, *job.spec.mounts)
    named = {"load": checkpoint.load, "save": checkpoint.save}
    folders = {key: path for key, path in named.items() if path is not None}
    places = [on_host(path, mounts) or path for path in folders.values()]
    problems = []
    for (key, path), listing in zip(folders.items(), _listings(places, transport), strict=True):
        found = format_of(listing)
        if found is not None and key == "save":
            problems.append(Problem("checkpoint.save", f"{path} {found.problem_of_target}"))
        elif found is not None and found is not ForeignFormat.HUGGING_FACE:
            problems.append(Problem("checkpoint.load", f"{path} {found.problem}"))
    return problems


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
