"""One build for all ranks: what the first rank uses every rank uses, or none does.

Ranks that computed by different builds, or by one build on different instruction sets, would drift apart by roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from trainer.distributed.collectives import any_rank, max_over_ranks
from trainer.ops.build.build_settings import BuildError, outcome_of


class Named(Protocol):
    """What was built. Of two with the same name it does not matter which is used."""

    @property
    def name(self) -> str:
        """What it was built from, how, and by which compiler."""


_Build = TypeVar("_Build", bound=Named)


@dataclass(frozen=True)
class BuildSource(Generic[_Build]):
    """How one rank gets hold of something that is built; all of it raises BuildError where that cannot be.

    Attributes:
        planned: the name of what would be built here.
        make: what is there, or else is built.
        take: what is there of that name; of any, if it is None.
    """

    planned: Callable[[], str]
    make: Callable[[], _Build]
    take: Callable[[str | None], _Build]


@dataclass(frozen=True)
class BuildConsensus:
    """One rank among those that use one build. Its methods are collective over all ranks, unless it is alone.

    Attributes:
        device: of what the ranks tell each other.
        builds: whether this rank builds what is missing, for others of its node too; rank 0 does. None: it is alone.
    """

    device: torch.device
    builds: bool | None

    def obtain(self, source: BuildSource[_Build]) -> _Build | BuildError:
        """What the first rank has, or why this rank has not got it.

        The first rank builds what its own compiler makes, and so do builders whose compiler would make the same, at the
        same time; the others look for it when that is done.
        """
        if self.builds is None:
            return outcome_of(partial(source.take, None))
        planned = outcome_of(source.planned) if self.builds else ""
        plan = self.of_first(planned if isinstance(planned, str) else "")
        found: _Build | BuildError | None = None
        if self.builds and (dist.get_rank() == 0 or planned == plan):
            found = outcome_of(source.make)
        self.any(False)
        name = self.of_first("" if found is None or isinstance(found, BuildError) else found.name)
        if not name:
            return found if isinstance(found, BuildError) else BuildError("rank 0 has none")
        if found is None:
            found = outcome_of(partial(source.take, name))
        if isinstance(found, BuildError) or found.name == name:
            return found
        return BuildError(f"it is {found.name} here, and {name} on rank 0")

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return flag if self.builds is None else any_rank(flag, self.device)

    def lowest(self, number: int) -> int:
        """The lowest number of all ranks."""
        return number if self.builds is None else -int(max_over_ranks([-float(number)], self.device)[0])

    def of_first(self, text: str) -> str:
        """What the first rank says."""
        texts = [text]
        if self.builds is not None and dist.get_world_size() > 1:
            dist.broadcast_object_list(texts, src=0, device=self.device)
        return texts[0]
