"""The model that a run starts from, read on the machine that has its files."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from llmctl.site.container import on_host
from llmctl.submit.job import Problem
from llmctl.submit.origins import Origin, Resolved
from llmctl.transport.file_reads import DEFAULT_LIMIT, FileRead
from llmctl.transport.protocol import Transport

_NEEDED = {"num_layers", "hidden_size", "num_attention_heads"}


class TransportFiles:
    """Files as the job sees them, over a transport."""

    def __init__(self, transport: Transport, mounts: Sequence[str]) -> None:
        """Wrap a transport; ``mounts`` are those of the job's container."""
        self._transport, self._mounts = transport, mounts

    def names(self, folder: str) -> Collection[str]:
        """See trainer.planning.start_model.Files."""
        return self._transport.list_names([self._place(folder)])[0]

    def read(self, path: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """See trainer.planning.start_model.Files."""
        place = self._place(path)
        first = self._transport.read_parts([FileRead(place, offset, DEFAULT_LIMIT if limit is None else limit)])[0]
        if first is None or limit is not None or first.end >= first.size:
            return None if first is None else first.data
        rest = self._transport.read_parts([FileRead(place, first.end, first.size - first.end)])[0]
        return None if rest is None else first.data + rest.data

    def _place(self, path: str) -> str:
        return on_host(path, self._mounts) or path


def with_start_model(
    resolved: Resolved, transport: Transport, mounts: Sequence[str], *, dry_run: bool
) -> tuple[Resolved, list[str]]:
    """Lay the values over the model of ``model.from`` or ``checkpoint.load``; a note says what comes from where.

    Args:
        resolved: the merged values, which have one of the two keys.
        transport: to a machine that has the job's folders.
        mounts: of the cluster's containers; those of the job are added.
        dry_run: do not contact another machine.

    Raises:
        UsageError, ConfigFileError: the model cannot be read, or values make another model of its weights; all of them.
        SchedulerError: the machine cannot be reached.
    """
    # Not at load: this file's class reads files for jobs without such a model too.
    from trainer.config.errors import ConfigError
    from trainer.planning.start_model import FROM, lay_over_start, section_of

    model, job = section_of(resolved.values, "model"), section_of(resolved.values, "job")
    key = f"model.{FROM}" if model.get(FROM) else "checkpoint.load"
    if dry_run and transport.is_remote:
        if model.keys() >= _NEEDED and FROM not in model:
            return resolved, []
        text = (
            f"the model is read on {transport.host}, which a dry run does not contact; give the section model, or run"
        )
        raise resolved.error([Problem(key, f"{text} this command on {transport.host}")])
    own = job.get("mounts")
    files = TransportFiles(transport, (*mounts, *(own if isinstance(own, list) else ())))
    try:
        started = lay_over_start(resolved.values, files)
    except ConfigError as error:
        raise resolved.error([Problem(each.key, each.problem) for each in error.all]) from None
    if started.problems:
        raise resolved.error([Problem(error.key, error.problem) for error in started.problems])
    below = {**resolved.below_flags}
    for taken in started.taken:
        section, _, name = taken.partition(".")
        below[section] = {name: started.values[section][name], **section_of(below, section)}
    below["model"] = {name: value for name, value in section_of(below, "model").items() if name != FROM}
    origins = {taken: Origin(where) for taken, where in started.taken.items()}
    notes = [f"the model is that of {where}" for where in dict.fromkeys(started.taken.values())]
    found = replace(resolved, values=started.values, origins={**origins, **resolved.origins}, below_flags=below)
    return found, notes
