"""Parallel mesh, collectives on small values, and random streams."""
