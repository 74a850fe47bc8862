"""Checks, layouts and costs of a training config, computed before any process starts. Torch-free."""
