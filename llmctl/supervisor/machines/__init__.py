"""Several machines without a scheduler: each one has a supervisor, and the head node decides on the next attempt."""
