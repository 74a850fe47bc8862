"""Free ports for tests, of which several may run on one machine."""

import errno
import random
import socket

# Below the ports of llmctl's own profiles and those that the kernel hands out.
_LOW, _HIGH = 10000, 19999


def free_ports(count: int) -> tuple[int, int]:
    """First and last of ``count`` consecutive ports that nobody uses, at a random place."""
    while True:
        first = random.SystemRandom().randrange(_LOW, _HIGH - count)
        if all(map(_is_free, range(first, first + count))):
            return first, first + count - 1


def _is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, port))
        except OSError as error:  # A kernel without IPv6 has another error.
            if error.errno == errno.EADDRINUSE:
                return False
    return True
