"""Checks of the files that a run reads, before it is queued. Torch-free; only small parts of files are read."""
