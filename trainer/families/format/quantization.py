"""Ways to publish quantized weights: those that are read, and words for the others. Torch-free."""

from __future__ import annotations

from typing import Any

CONFIG_KEY = "quantization_config"
"""Key of config.json."""
_INSTEAD = "take the model's files in bfloat16, float16 or float32"


def quantization_method(config: Any) -> str:
    """Name of the method in a ``quantization_config``."""
    table = config if isinstance(config, dict) else {"quant_method": config}
    return str(table.get("quant_method") or table.get("quant_algo") or "a method without a name")


def fp8_block(config: Any) -> tuple[int, int] | None:
    """Rows and columns of the block that has a scale; None if the scales are laid out in another way."""
    block = config.get("weight_block_size") if isinstance(config, dict) else None
    if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
        return block[0], block[1]
    return None


def quantization_problem(config: Any) -> str | None:
    """Words on weights of a ``quantization_config`` that are not read, without their subject; None if they are read."""
    method = quantization_method(config)
    if method == "fp8" and fp8_block(config) is None:
        block = config.get("weight_block_size") if isinstance(config, dict) else None
        return (
            f"{CONFIG_KEY} has weight_block_size {block!r}, but fp8 is read only with a scale for each block, of two "
            f"sizes; {_INSTEAD}"
        )
    if method in ("fp8", "mxfp4"):
        return None
    return (
        f"its weights are quantized by {method}, which is not read; {_INSTEAD}, or in fp8 with a scale for each block, "
        "or in mxfp4"
    )
