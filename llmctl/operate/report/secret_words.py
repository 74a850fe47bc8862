"""Values that a page of a run must not show. Pure."""

import re
from collections.abc import Mapping, Sequence

SHORTEST = 6
"""Characters of the shortest value that is searched in logs: a shorter one stands in many words."""
_TELLING = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
HIDDEN = "..."


def shown_command(words: Sequence[str]) -> list[str]:
    """The words of a command line, with the names of ``--env`` and without their values."""
    shown: list[str] = []
    for position, word in enumerate(words):
        if position and words[position - 1] == "--env":
            shown.append(_name_only(word))
        elif word.startswith("--env="):
            shown.append("--env=" + _name_only(word.removeprefix("--env=")))
        else:
            shown.append(word)
    return shown


def secret_values(job: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, str]:
    """Value -> name of what logs may repeat: the secrets of a job, and variables of its env with a telling name.

    The record holds no value of a secret. The value is known if the caller's environment still has it.

    Args:
        job: the job of a record.
        environment: of the caller.
    """
    names, env = job.get("secrets"), job.get("env")
    found = {name: environment.get(str(name), "") for name in (names if isinstance(names, list | tuple) else ())}
    if isinstance(env, Mapping):
        found |= {name: str(value) for name, value in env.items() if _TELLING.search(str(name))}
    return {value: str(name) for name, value in found.items() if len(value) >= SHORTEST}


def without_secrets(text: str, values: Mapping[str, str]) -> str:
    """The text with the name in the place of each value."""
    # The longest first: one value may contain another.
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, f"[{values[value]}]")
    return text


def _name_only(setting: str) -> str:
    name, equals, _ = setting.partition("=")
    return f"{name}={HIDDEN}" if equals else name
