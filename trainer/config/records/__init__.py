"""Records in a run directory that the trainer writes and llmctl reads. Pure and torch-free."""
