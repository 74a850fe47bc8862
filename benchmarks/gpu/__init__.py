"""Measurements on one GPU, in stages that fit a short visit: see ``stages``."""
