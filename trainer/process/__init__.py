"""One process of a job: launch environment, run directory, heartbeat, stop, metrics."""
