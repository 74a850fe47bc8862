"""Flags of sbatch, srun and qsub for a job's values: read as ours where they mean one thing, answered otherwise."""

from collections.abc import Sequence

from llmctl.errors import UsageError

_OURS = {
    "--nodes": "-N",
    "--time": "-t --walltime",
    "--name": "-J --job-name",
    "--group": "-A --account -P --project -g",
    "--queue": "-p --partition -q",
    "--container": "--container-image",
    "--mount": "--container-mounts",
    "--gpus-per-node": "--ntasks-per-node --tasks-per-node",
    "--notify": "--mail-user -M",
    "--notify-on": "--mail-type -m",
}
"""Our flag -> theirs, which no help page shows."""

_OF_A_NODE = "give --nodes N, and --gpus-per-node G for the GPUs of each node"
_ANSWERS = {
    _OF_A_NODE: "--gpus -G --gres --ngpus --num-gpus",
    "a node has a rank on each GPU; give --nodes N, and --gpus-per-node G for fewer": "-n --ntasks --nprocs",
    "give --resource-type T, --nodes N and --time T": "-l --resource --constraint -C",
    "give --after RUN": "--dependency -d --hold_jid --begin",
    "give --env NAME=VALUE, once for each variable": "--export -v -V",
    "the output is in the run directory, and `llmctl logs RUN` shows it": "--output -o --error -e",
    "put it into `options` of the cluster's profile": "--qos --mem --mem-per-gpu --cpus-per-task -c "
    "--signal --comment --exclusive --array -a",
    "nodes cannot be chosen by name; --exclude HOST leaves some out": "--nodelist -w",
    "a command stands after --: llmctl submit -- COMMAND": "--wrap",
}


def in_our_words(words: Sequence[str], unknown: str) -> list[str] | None:
    """A command line with an unknown flag of a scheduler replaced by ours; None if no scheduler has the flag.

    Args:
        words: of the command line.
        unknown: the flag, as the parser names it.

    Raises:
        UsageError: the flag has no flag of ours, or contradicts one; says what to give.
    """
    ours = next((flag for flag, theirs in _OURS.items() if unknown in theirs.split()), None)
    if ours is None:
        answer = next((answer for answer, theirs in _ANSWERS.items() if unknown in theirs.split()), None)
        if answer is None:
            return None
        raise UsageError(f"{unknown}: {answer}")
    place = next(place for place, word in enumerate(words) if _is_flag(word, unknown))
    values = _values(words, place, unknown)
    if ours == "--gpus-per-node":
        _check_ranks(words, unknown, values)
    if unknown == "--container-mounts":
        values = [mount for value in values for mount in value.split(",")]
    if ours == "--notify":
        values = [f"mailto:{value}" for value in values]
    if ours == "--notify-on":
        values = [_events(unknown, value) for value in values]
    given = [word for value in values for word in (ours, value)] or [ours]
    after = place + (1 if words[place] != unknown else 2)
    return [*words[:place], *given, *words[after:]]


def _events(flag: str, text: str) -> str:
    """Our events for a scheduler's mail words."""
    from llmctl.site.notify import events_of_mail

    events = events_of_mail(text)
    if events is None:
        raise UsageError(f"{flag} {text}: has no counterpart; give --notify-on begin,end,fail,hang,restart")
    return ",".join(events)


def _is_flag(word: str, flag: str) -> bool:
    """True for the flag alone or with its value: ``--flag=VALUE``, ``-fVALUE``."""
    return word == flag or word.startswith(f"{flag}=" if flag.startswith("--") else flag)


def _values(words: Sequence[str], place: int, flag: str) -> list[str]:
    """The value of the flag at a place of the command line; empty at its end."""
    if words[place] != flag:
        return [words[place][len(flag) :].removeprefix("=")]
    return list(words[place + 1 : place + 2])


def _check_ranks(words: Sequence[str], flag: str, tasks: Sequence[str]) -> None:
    """Refuse tasks of each node that are another number than the ranks."""
    at = next((place for place, word in enumerate(words) if _is_flag(word, "--gpus-per-node")), None)
    ranks = tasks if at is None else _values(words, at, "--gpus-per-node")
    if ranks != tasks:
        raise UsageError(
            f"{flag} {' '.join(tasks)}: a node has a rank on each GPU, and --gpus-per-node is {' '.join(ranks)}; "
            f"leave {flag} out"
        )
