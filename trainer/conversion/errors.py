"""The error of a conversion."""

from __future__ import annotations


class ConversionError(Exception):
    """A model cannot be converted. The message is one sentence that names the file, and what to do."""
