"""Commands of ``python -m trainer``."""
