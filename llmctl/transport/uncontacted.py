"""The machine of a cluster that a dry run does not contact."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from llmctl.errors import SchedulerError


class UncontactedMachine:
    """Stands for a Transport to another machine in a dry run; answers only what needs no connection."""

    is_remote = True

    def __init__(self, host: str, home: str) -> None:
        """Name the machine; ``home`` is shown in place of the user's home directory there."""
        self.host = host
        self._home = home

    def home(self) -> str:
        """See Transport."""
        return self._home

    def variables(self, names: Sequence[str]) -> Mapping[str, str]:
        """See Transport: a word in place of each."""
        return {name: f"/YOUR-{name}" for name in names}

    def close(self) -> None:
        """See Transport."""

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse every question to the machine."""
        raise SchedulerError(f"{self.host}: a dry run does not contact another machine ({name})", transient=False)
