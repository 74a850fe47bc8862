"""Batches for a run: datasets built from the config, read ahead by a loader."""
