"""The next job of a chain, which the job before has submitted (see llmctl/supervisor/chain/links.py)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.backends.base import QueueBackend
from llmctl.errors import SchedulerError
from llmctl.runs.json_values import int_of, mapping_of, text_of
from llmctl.supervisor.chain.links import link_name


@dataclass(frozen=True)
class Link:
    """A job that the job before has submitted.

    Attributes:
        number: place in the chain; 1 is the job that llmctl has submitted.
        said: the scheduler's answer to the submission.
    """

    number: int
    said: str

    def job_id(self, backend: QueueBackend) -> str:
        """Id of the job; empty if the answer has none."""
        try:
            return backend.parse_job_id(self.said)
        except SchedulerError:
            return ""


@dataclass(frozen=True)
class WaitingJob:
    """The run's next job, which has made no attempt yet: its link, and its id (empty if unknown)."""

    link: int
    job_id: str

    def __str__(self) -> str:
        """Words for the job: ``link 3 of the chain, job 123``."""
        return f"link {self.link} of the chain, job {self.job_id or 'unknown'}"


def newest_link_file(names: Sequence[str], submission: int | None) -> str:
    """Name of the newest answer among the names in ``attempts``; empty without one."""
    pattern = re.compile(rf"{re.escape(link_name(submission or 0, 0)[:-1])}(\d+)")
    found = [int(match[1]) for name in names if (match := pattern.fullmatch(name))]
    return link_name(submission or 0, max(found)) if found else ""


def parse_link(data: bytes | None) -> Link | None:
    """Parse an answer; None if unreadable or without the number of the link."""
    values = mapping_of(data)
    number = int_of(values, "link") if values is not None else None
    return Link(number, text_of(values, "said")) if values is not None and number is not None else None
