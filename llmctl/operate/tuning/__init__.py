"""Short runs of the fastest layouts in one job, of which the fastest becomes a config."""
