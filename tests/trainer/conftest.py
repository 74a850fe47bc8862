"""Real ranks for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.trainer.spawn import Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A pool of four ranks, or of RANKS of the module."""
    with Ranks(getattr(request.module, "RANKS", 4)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def serials() -> dict[Any, Any]:
    """Serial runs of parity cases, each computed once in a module."""
    return {}
