"""Data of a run: tokenizers, indexed datasets, samples, batches, and commands that prepare them."""
