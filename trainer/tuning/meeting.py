"""Words that the nodes of a job pass each other, through a store on the head node."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_JOIN = timedelta(minutes=10)
"""Time in which all nodes have to start."""
_LONGEST = timedelta(days=7)


class Meeting:
    """A store of small documents. Each is written once."""

    def __init__(self, address: str, port: int, node: int) -> None:
        """Open the store on node 0, or reach it from another.

        Raises:
            RuntimeError: the head node cannot be reached.
        """
        self._store = TCPStore(address, port, is_master=node == 0, timeout=_JOIN, wait_for_workers=False)

    def tell(self, key: str, document: Any) -> None:
        """Write a document."""
        self._store.set(key, json.dumps(document))

    def heard(self, key: str) -> bool:
        """True if the document is there."""
        return bool(self._store.check([key]))

    def wait(self, key: str, timeout: timedelta = _LONGEST) -> Any:
        """The document, as soon as it is there.

        Raises:
            RuntimeError: it does not come in time, or the head node has ended.
        """
        self._store.wait([key], timeout)
        return json.loads(self._store.get(key))

    def leave(self, node: int, nodes: int) -> None:
        """Keep the store open until all nodes have left; the head node comes last."""
        with suppress(RuntimeError):
            if node:
                self.tell(f"left/{node}", True)
                return
            for other in range(1, nodes):
                self.wait(f"left/{other}", _JOIN)
