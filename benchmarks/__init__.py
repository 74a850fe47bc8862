"""Benchmarks: each script measures llmctl and its peers together, and prints the ratio."""
