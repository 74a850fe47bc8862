"""Tokenizers of every kind that published models come with, read from local files and nowhere else."""
