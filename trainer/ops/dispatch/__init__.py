"""Selection of a backend for every op: availability, self-test, tuning results, consensus of ranks."""
