"""Values of a JSON file that may be missing, half-written or foreign: what is unreadable is None or empty."""

import json
from collections.abc import Mapping
from typing import Any


def mapping_of(data: bytes | None) -> Mapping[str, Any] | None:
    """The object in a file; None if there is none."""
    if data is None:
        return None
    try:
        values = json.loads(data)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def text_of(values: Mapping[str, Any], key: str) -> str:
    """The text, or an integer as text; else empty."""
    value = values.get(key)
    return str(value) if isinstance(value, str | int) else ""


def int_of(values: Mapping[str, Any], key: str) -> int | None:
    """The integer, also one in decimal digits; else None."""
    value = values.get(key)
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def float_of(values: Mapping[str, Any], key: str) -> float | None:
    """The number; else None."""
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
