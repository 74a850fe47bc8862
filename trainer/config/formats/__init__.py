"""Formats of data files that the trainer reads and llmctl checks before a job is queued. Pure and torch-free."""
