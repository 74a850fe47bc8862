"""Words of gloo, NCCL and torch's store by which a rank learns that a peer is lost. Torch-free."""

from __future__ import annotations

import re
from typing import Literal

_GONE = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "got 0 bytes",
    "socket closed",
    "remote process exit",
    "communicator was aborted",
)
"""Messages of gloo, NCCL and torch's store for a connection that the other side has closed.

Whole phrases, because a rank that cannot open its own socket, or finds no interface, is itself a cause.
"""
_LATE = (
    "timed out waiting",
    "timed out after",
    "timed out connecting",
    "connection timed out",
    "timeout caused pair closure",
    "wait timeout after",
    "socket timeout",
    "caught collective operation timeout",
)
"""Messages for a peer that does not answer. CUDA reports a slow kernel as: timed out and was terminated."""
_BOILERPLATE = re.compile(r"\. This is typically caused by.*", re.DOTALL)
_SOURCE_PLACE = re.compile(r"^\[[^\]]*:\d+\] ")


def backend_words(error: BaseException) -> str:
    """The backend's own words, without its advice and the place in its source."""
    return _BOILERPLATE.sub("", _SOURCE_PLACE.sub("", str(error)))


def lost_peer(message: str) -> Literal["gone", "late"] | None:
    """``gone`` if a peer has closed the connection, ``late`` if it does not answer; None for other words."""
    words = message.lower()
    if any(word in words for word in _LATE):
        return "late"
    return "gone" if any(word in words for word in _GONE) else None
