"""Tokenizers of every kind that published models use, read only from local files."""
