"""Tensors and keys that families with a mixture of experts share. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.families.format.family import Weight, affine, weight
from trainer.families.format.forms import ByExpert, Plain, Stacked

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def layer_pattern(has_experts: list[bool]) -> list[bool] | int:
    """moe_layer_freq for these layers: 1 if all have experts."""
    return 1 if all(has_experts) else has_experts


def experts(
    model: ModelConfig, layer: int, theirs: str, gate: str, up: str, down: str, router: str = "gate"
) -> Iterator[Weight]:
    """Router and experts of one layer, whose experts are numbered tensors.

    Args:
        model: the model section.
        layer: number of the layer.
        theirs: prefix of the layer's mixture of experts.
        gate: name of an expert's gate product.
        up: name of an expert's up product.
        down: name of an expert's down product.
        router: name of the router's product.
    """
    ours, count = f"layers.{layer}.moe", model.num_experts or 0
    yield from affine(f"{ours}.router", f"{theirs}.{router}", has_bias=model.moe_router_bias)
    numbered = [f"{theirs}.experts.{expert}" for expert in range(count)]
    first = [f"{expert}.{name}.weight" for expert in numbered for name in (gate, up)]
    yield weight(f"{ours}.experts.fc1.weight", *first, form=ByExpert(count, Stacked()))
    second = [f"{expert}.{down}.weight" for expert in numbered]
    yield weight(f"{ours}.experts.fc2.weight", *second, form=ByExpert(count, Plain()))
