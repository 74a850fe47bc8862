"""Estimates of memory and time of a training run, before it starts. Torch-free."""
