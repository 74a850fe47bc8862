"""Selection of a backend for every op: availability, self-test, tuning results, agreement of all ranks."""
