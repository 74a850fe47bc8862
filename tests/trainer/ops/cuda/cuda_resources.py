"""Resources of kernels in ptxas' ``-v`` output: registers, stack, spills, shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<architecture>\d+)a?'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_STATIC_SHARED_BYTES = 48 << 10


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel: registers and bytes per thread, and shared bytes per block."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def problem(self) -> str | None:
        """Reason why this kernel would be slow or fail to launch, or None."""
        if self.stack or self.spill_stores or self.spill_loads:
            return f"{self.name}: {self.stack} bytes of stack, {self.spill_stores} spilled, {self.spill_loads} reloaded"
        return f"{self.name}: {self.shared} bytes of shared memory" if self.shared > _STATIC_SHARED_BYTES else None


def resources_of(log: str) -> list[KernelResources]:
    """Resources of all kernels in a compiler's log."""
    found = []
    for entry in _ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        numbers = (int(entry[key]) for key in ("registers", "stack", "stores", "loads"))
        found.append(KernelResources(entry["name"], *numbers, int(shared[1]) if shared else 0))
    return found
