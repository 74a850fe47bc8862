"""Layers divided over the tp axis, and the collectives between their shards."""
