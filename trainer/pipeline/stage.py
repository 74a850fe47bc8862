"""Which layers each pipeline stage holds. Torch-free."""

from __future__ import annotations


def layers_of_stage(num_layers: int, pp: int, pp_rank: int) -> range:
    """Global numbers of the layers of stage ``pp_rank``: contiguous, as many on each stage.

    Raises:
        ValueError: ``pp`` does not divide ``num_layers`` (a layer would silently be left out), or no such stage.
    """
    if num_layers % pp:
        raise ValueError(f"{num_layers} layers cannot be divided evenly over {pp} pipeline stages")
    if not 0 <= pp_rank < pp:
        raise ValueError(f"there is no stage {pp_rank} among {pp}")
    per_stage = num_layers // pp
    return range(pp_rank * per_stage, (pp_rank + 1) * per_stage)
