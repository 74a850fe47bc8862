"""Causes of failures: how they are read from what a run leaves, and the words for them."""
