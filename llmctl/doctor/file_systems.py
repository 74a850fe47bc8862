"""Kind and free space of a file system, from the output of df(1). Pure."""

import re
from dataclasses import dataclass

_NETWORK = re.compile(r"lustre|nfs|gpfs|beegfs|ceph|wekafs|panfs|pvfs|orangefs|afs|glusterfs|cvfs|9p|fuse|dvs")


@dataclass(frozen=True)
class Space:
    """File system of a path."""

    kind: str
    free_gib: float

    @property
    def is_network(self) -> bool:
        """True if other machines may have the same file system."""
        return _NETWORK.search(self.kind.lower()) is not None


def parse_space(text: str) -> Space | None:
    """Parse the output of ``df -PTk PATH``; None if it is not understood."""
    lines = text.splitlines()
    fields = lines[-1].split() if len(lines) > 1 else []
    # Filesystem Type 1024-blocks Used Available Capacity Mounted-on; a name with spaces shifts them.
    numbers = [index for index, field in enumerate(fields) if field.isdigit()]
    if len(numbers) < 3 or numbers[0] == 0:
        return None
    return Space(fields[numbers[0] - 1], int(fields[numbers[0] + 2]) / (1 << 20))
