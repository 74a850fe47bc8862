"""Predictions of ``llmctl plan`` beside published runs, row by row."""
