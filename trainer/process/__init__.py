"""One process of a job: launch environment, rendezvous, run directory, heartbeat, stop, metrics."""
