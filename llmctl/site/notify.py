"""Places and events of notices (``job.notify``, ``job.notify_on``), and the mail words of schedulers. Pure."""

import re
import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

EVENTS = ("begin", "end", "fail", "hang", "restart")
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]*(@[A-Za-z0-9][A-Za-z0-9.-]*)?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_PATHS = re.compile(
    r"hooks\.slack\.com|/api/webhooks/|webhook\.office\.com|logic\.azure\.com|api\.telegram\.org"
)
"""Webhooks whose address alone lets anybody write: Slack, Discord, Teams, Telegram."""
_MAIL_WORDS = {
    "NONE": (),
    "BEGIN": ("begin",),
    "END": ("end",),
    "FAIL": ("fail",),
    "REQUEUE": ("restart",),
    "TIME_LIMIT": ("end",),
    "ALL": EVENTS,
}
_MAIL_LETTERS = {"n": (), "b": ("begin",), "e": ("end",), "a": ("fail",)}
"""Words of sbatch's --mail-type and letters of qsub's -m -> events."""
_VALID = "give https://ADDRESS, mailto:ADDRESS, secret:NAME (a variable with an address) or command:PROGRAM ARGS"


def place_problem(place: str, secrets: Sequence[str]) -> str:
    """Problem of a place of notices, and what is valid; empty if it can be used.

    Args:
        place: one entry of job.notify.
        secrets: names of the job's secrets.
    """
    kind, _, rest = place.partition(":")
    if any(ord(letter) < 32 for letter in place):
        return f"{kind}: has a line break or a control character; {_VALID}"
    if kind in ("http", "https"):
        return _address_problem(place)
    if kind == "mailto":
        return "" if _ADDRESS.fullmatch(rest) else f"{place!r} has no valid address; give mailto:NAME@HOST"
    if kind == "secret":
        if not _NAME.fullmatch(rest):
            return "secret: is followed by something other than the name of a variable; give secret:NAME"
        return "" if rest in secrets else f"{place} needs the variable; give --secret {rest} too"
    if kind == "command":
        if _SECRET_PATHS.search(rest):
            return "command: has an address that is a secret of its own; let the program read it from a file of yours"
        try:
            return "" if shlex.split(rest) else "command: names no program; give command:PROGRAM ARGS"
        except ValueError:
            return f"{place!r} has a quote that never closes; give command:PROGRAM ARGS"
    return f"{place!r} is not valid: {_VALID}"


def _address_problem(place: str) -> str:
    try:
        parts = urlsplit(place)
        host = parts.hostname
    except ValueError:
        host = None
    if not host or " " in place:
        return f"{place!r} is not a valid address; {_VALID}"
    if parts.username or parts.password or _SECRET_PATHS.search(place):
        # The address itself is not repeated: it may stand in a terminal's log.
        return (
            f"the address at {host} is a secret of its own; export it as a variable, such as WEBHOOK, and give "
            "--secret WEBHOOK --notify secret:WEBHOOK"
        )
    return ""


def event_problem(event: str) -> str:
    """Problem of an entry of job.notify_on; empty if it is an event."""
    return "" if event in EVENTS else f"{event!r} is none of {', '.join(EVENTS)}"


def events_of_mail(text: str) -> list[str] | None:
    """Events of sbatch's ``--mail-type`` or qsub's ``-m``; None for a word without a counterpart.

    Sources: sbatch(1), qsub(1B), qsub(1) of Grid Engine.
    """
    words = text.upper().split(",")
    if all(word in _MAIL_WORDS for word in words):
        found = [event for word in words for event in _MAIL_WORDS[word]]
    elif text and set(text) <= _MAIL_LETTERS.keys():
        found = [event for letter in text for event in _MAIL_LETTERS[letter]]
    else:
        return None
    return list(dict.fromkeys(found))
