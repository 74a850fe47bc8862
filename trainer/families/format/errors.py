"""The error of a model that no family can read or write. Torch-free."""

from __future__ import annotations


class FamilyError(Exception):
    """A model of an unknown family, or with a property that this trainer lacks. The message is one sentence."""
