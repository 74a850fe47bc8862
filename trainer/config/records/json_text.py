"""JSON text of records and documents. NaN and infinity, which JSON lacks, are null. Torch-free."""

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """A value as JSON.

    Args:
        value: of plain values, mappings, lists and tuples.
        indent: spaces of each level; None: all in one line.
        ensure_ascii: write other characters as escapes.
    """
    return json.dumps(json_values(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)


def json_values(value: Any) -> Any:
    """A value as JSON has it: a number that is not finite becomes None, a name becomes text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): json_values(inner) for name, inner in value.items()}
    return [json_values(inner) for inner in value] if isinstance(value, (list, tuple)) else value
