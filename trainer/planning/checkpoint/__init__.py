"""Checks of the section ``checkpoint``."""
