"""Lists with one entry per layer, also in Megatron-LM's notation ``([0]*3+[1]*58)``. Torch-free."""

from __future__ import annotations

import ast
from typing import Any

MAX_LAYERS = 10_000


def parse_layer_pattern(value: Any) -> Any:
    """A list of bools for a pattern; any other value unchanged.

    Args:
        value: a list of 0 and 1, or a string with an expression of such lists, ``+``, ``*`` and brackets.

    Raises:
        ValueError: a list with other entries, or an expression with anything else in it.
    """
    if isinstance(value, str) and "[" in value:
        try:
            value = _evaluate(ast.parse(value.strip(), mode="eval").body)
        except (SyntaxError, TypeError, RecursionError, MemoryError):
            value = None
        if not isinstance(value, list):
            raise ValueError("needs lists of 0 and 1 joined by + and repeated by *, as in ([0]*3+[1]*58)")
    if isinstance(value, list):
        if not all(type(entry) in (int, bool) and entry in (0, 1) for entry in value):
            raise ValueError("needs 0 or 1 for each layer")
        return [bool(entry) for entry in value]
    return value


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.List):
        return [_evaluate(entry) for entry in node.elts]
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        length = (len(left) if isinstance(left, list) else left) * (len(right) if isinstance(right, list) else right)
        if not 0 <= length <= MAX_LAYERS:
            raise TypeError(length)
        return left * right
    raise TypeError(type(node).__name__)
