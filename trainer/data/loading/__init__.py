"""Batches of a run: datasets built from the config, and a prefetching loader."""
