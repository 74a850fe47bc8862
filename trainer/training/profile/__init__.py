"""Profiles of a few iterations, on request."""
