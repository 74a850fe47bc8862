"""The error of a Hugging Face folder."""

from __future__ import annotations


class HubError(Exception):
    """A folder in Hugging Face's format cannot be read or written. The message is one sentence that names the file."""
