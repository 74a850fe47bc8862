"""Build consensus: rank 0's build or none, a common instruction set, no deadlock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

from tests.trainer.spawn import Ranks
from trainer.ops.build.build_settings import BuildError, BuildSettings
from trainer.ops.dispatch import setup
from trainer.ops.dispatch.build_consensus import BuildConsensus
from trainer.ops.dispatch.library import Library
from trainer.ops.dispatch.setup import KernelSetup
from trainer.planning.kernel_choice import RequestedBackend

CPU = torch.device("cpu")
AUTO = {"rms_norm": RequestedBackend("auto", "training.kernel_backend", False)}


@dataclass(frozen=True)
class Build:
    """A build."""

    name: str


def fail(error: Exception) -> Callable[..., Build]:
    def raising(*_: object) -> Build:
        raise error

    return raising


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def obtain(rank: int, world_size: int, builders: int, planned: tuple[str, str], there: tuple[str, ...]) -> object:
    """Run ``obtain`` with the names of each rank's planned build and of existing builds."""
    del world_size
    made: list[str] = []

    def make() -> Build:
        made.append(planned[rank])
        return Build(planned[rank])

    def take(name: str | None) -> Build:
        if name in there:
            return Build(str(name))
        raise BuildError(f"no {name} here")

    same = BuildConsensus(CPU, rank < builders)
    found = same.obtain(lambda: planned[rank], make, take)
    return found.reason if isinstance(found, BuildError) else found.name, made


def test_all_ranks_use_the_build_of_rank_0(ranks: Ranks) -> None:
    # One node: rank 1 takes the build of rank 0, although the build of its own compiler exists too.
    assert ranks.run(obtain, 1, ("g++ 12", "g++ 13"), ("g++ 12", "g++ 13")) == [("g++ 12", ["g++ 12"]), ("g++ 12", [])]
    # Two nodes with the same compiler build at the same time.
    both = ("g++ 12", "g++ 12")
    assert ranks.run(obtain, 2, both, both) == [("g++ 12", ["g++ 12"])] * 2
    # With different compilers the second node builds nothing, and takes the first node's build if visible.
    other = ("g++ 12", "g++ 13")
    assert ranks.run(obtain, 2, other, other) == [("g++ 12", ["g++ 12"]), ("g++ 12", [])]
    assert ranks.run(obtain, 2, other, ("g++ 13",)) == [("g++ 12", ["g++ 12"]), ("no g++ 12 here", [])]


def obtain_with_failures(rank: int, world_size: int, planned_fails: bool, on: int) -> str:
    del world_size
    failing = fail(OSError("Stale file handle\nand more"))

    def name() -> str:
        return failing().name if planned_fails and rank == on else "g++ 12"

    make = failing if rank == on else lambda: Build("g++ 12")
    found = BuildConsensus(CPU, True).obtain(name, make, lambda name: Build(f"found {name}"))
    return found.reason if isinstance(found, BuildError) else found.name


def test_nobody_waits_for_a_rank_that_fails_whatever_it_fails_with(ranks: Ranks) -> None:
    wrong = "OSError: Stale file handle"
    assert ranks.run(obtain_with_failures, False, 0) == [wrong, "rank 0 has no build"]
    assert ranks.run(obtain_with_failures, False, 1) == ["g++ 12", wrong]
    # A rank that cannot name its planned build does not build, and takes a build with another name than requested.
    message = "this rank has found g++ 12, and rank 0 has g++ 12"
    assert ranks.run(obtain_with_failures, True, 1) == ["g++ 12", message]


@dataclass(frozen=True)
class LibraryOfTest(Library):
    """A library without a file."""

    def at_level(self, level: str) -> Library:
        return replace(self, level=level)


def availability(rank: int, world_size: int, levels: tuple[str, str], error: str | None) -> tuple[object, object]:
    """Availability on a processor of levels[rank]; rank 1 may raise the named error instead."""
    del world_size
    raised = {"ValueError": ValueError("a value"), "AttributeError": AttributeError("no such thing")}
    settings = BuildSettings(setup.Path("/nowhere"))
    library = LibraryOfTest(settings.cache / "key" / "compiler.so", levels[rank])

    def load(*_: object) -> Library:
        if error is not None and rank == 1:
            raise raised[error]
        return library

    fakes = {"built_name": lambda _: "key/compiler.so", "load_on_demand": load, "load_built": load}
    with mock.patch.multiple(setup, **fakes):
        found = KernelSetup(settings, CPU, builds=rank == 0).availability(AUTO)
    return found.described.get("native"), found.missing.get("native", "").split(";")[0]


def test_all_ranks_use_an_instruction_set_that_all_have(ranks: Ranks) -> None:
    mixed = ("x86-64-v4", "x86-64-v3")
    assert ranks.run(availability, mixed, None) == [("x86-64-v3", "")] * 2
    assert ranks.run(availability, mixed[::-1], None) == [("x86-64-v3", "")] * 2


@pytest.mark.parametrize("error", ["ValueError", "AttributeError"])
def test_an_unexpected_error_of_one_rank_does_not_stop_the_others(ranks: Ranks, error: str) -> None:
    first, second = ranks.run(availability, ("x86-64-v4", "x86-64-v4"), error)
    assert first == ("x86-64-v4", "")
    assert second[0] is None and second[1].startswith(f"{error}: ")
