"""Predictions beside calculon, over the rows of calculon's own validation."""
