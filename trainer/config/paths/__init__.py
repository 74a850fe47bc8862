"""Paths of a config."""
