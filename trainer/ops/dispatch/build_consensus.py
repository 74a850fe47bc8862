"""Build consensus: all ranks use the build of rank 0, or none.

Ranks with different builds, or with one build on different instruction sets, would diverge by rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from trainer.distributed.collectives import any_rank, max_over_ranks
from trainer.ops.build.build_settings import BuildError, outcome_of


class Named(Protocol):
    """A build. Two builds with the same name are interchangeable."""

    @property
    def name(self) -> str:
        """Identity of the build: sources, flags and compiler."""


_Build = TypeVar("_Build", bound=Named)


@dataclass(frozen=True)
class BuildConsensus:
    """One rank's part in the build consensus. Collective: all ranks, unless ``builds`` is None.

    Attributes:
        device: device of the messages between ranks.
        builds: True if this rank builds for its node; rank 0 must. None: a single process without a job.
    """

    device: torch.device
    builds: bool | None

    def obtain(
        self, planned_name: Callable[[], str], make: Callable[[], _Build], take: Callable[[str | None], _Build]
    ) -> _Build | BuildError:
        """The build of rank 0, or the error of this rank in loading it.

        Rank 0 builds with its compiler. Builders whose compiler would produce the same build do so at the same time.
        All other ranks look for the build afterwards.

        Args:
            planned_name: returns the name of the build that ``make`` would produce here; all three raise BuildError.
            make: returns an existing build, or builds.
            take: returns the existing build of a name, or any existing build for None.
        """
        if self.builds is None:
            return outcome_of(partial(take, None))
        planned = outcome_of(planned_name) if self.builds else ""
        plan = self.of_first(planned if isinstance(planned, str) else "")
        found: _Build | BuildError | None = None
        if self.builds and (dist.get_rank() == 0 or planned == plan):
            found = outcome_of(make)
        self.any(False)
        name = self.of_first("" if found is None or isinstance(found, BuildError) else found.name)
        if not name:
            return found if isinstance(found, BuildError) else BuildError("rank 0 has no build")
        if found is None:
            found = outcome_of(partial(take, name))
        if isinstance(found, BuildError) or found.name == name:
            return found
        return BuildError(f"this rank has {found.name}, and rank 0 has {name}")

    def any(self, flag: bool) -> bool:
        """True if ``flag`` is True on any rank."""
        return flag if self.builds is None else any_rank(flag, self.device)

    def lowest(self, number: int) -> int:
        """Minimum of ``number`` over all ranks."""
        return number if self.builds is None else -int(max_over_ranks([-float(number)], self.device)[0])

    def of_first(self, text: str) -> str:
        """The text of rank 0."""
        texts = [text]
        if self.builds is not None and dist.get_world_size() > 1:
            dist.broadcast_object_list(texts, src=0, device=self.device)
        return texts[0]
