"""Selection of a backend for every op: availability, self-test, consensus of ranks."""
