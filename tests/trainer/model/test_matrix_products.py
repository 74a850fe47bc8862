"""Matrix products by oneDNN: their results, and the choice of products."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainer.model.tensor_parallel import matrix_products
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.linear import ColumnParallelLinear
from trainer.model.tensor_parallel.matrix_products import product, product_by_onednn

ROWS, IN, OUT = 129, 256, 320

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the rows that went to oneDNN.

    Simulates a processor where oneDNN is the faster library.
    """
    seen: list[torch.Size] = []

    def recorded(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(rows.shape)
        return product_by_onednn(rows, weight, bias)

    monkeypatch.setattr(matrix_products, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(matrix_products, "product_by_onednn", recorded)
    return seen


def drawn(*shape: int) -> torch.Tensor:
    """Random numbers, the same at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_onednn
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        lambda: drawn(ROWS, 1, IN),
        lambda: drawn(2, ROWS, IN).transpose(0, 1),
        lambda: drawn(IN, ROWS).t(),
        lambda: drawn(1, 1, IN).expand(ROWS, 2, IN),
        lambda: drawn(ROWS, 2 * IN)[:, 1::2],
    ],
    ids=["whole", "transposed", "columns", "expanded", "every-second"],
)
@pytest.mark.parametrize("weight", [lambda: drawn(OUT, IN), lambda: drawn(IN, OUT).t()], ids=["rows", "columns"])
def test_a_product_is_that_of_float64(
    rows: Callable[[], torch.Tensor], weight: Callable[[], torch.Tensor], has_bias: bool
) -> None:
    bias = drawn(OUT) if has_bias else None
    exact = nn.functional.linear(rows().double(), weight().double(), None if bias is None else bias.double())
    found = product_by_onednn(rows(), weight(), bias)
    assert found.shape == exact.shape and found.is_contiguous() and found._base is None
    assert (found - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert torch.equal(found, product_by_onednn(rows(), weight(), bias))


@needs_onednn
@pytest.mark.parametrize("pair", [False, True])
def test_a_layer_has_the_same_gradients(calls: list[torch.Size], pair: bool) -> None:
    shape = (2, OUT // 2) if pair else (OUT,)
    results = []
    for dtype in (torch.float64, torch.float32):
        weight, bias = nn.Parameter(drawn(*shape, IN).to(dtype)), nn.Parameter(drawn(*shape).to(dtype))
        inputs = drawn(ROWS, 2, IN).to(dtype).requires_grad_()
        outputs = ColumnParallelLinear(weight, bias, TensorParallel())(inputs)
        found = outputs.detach().clone()
        # In place, as the loss does to logits.
        halved = outputs.mul_(0.5) if dtype == torch.float32 else outputs * 0.5
        halved.square().sum().backward()
        assert inputs.grad is not None and weight.grad is not None and bias.grad is not None
        results.append((found, inputs.grad, weight.grad, bias.grad))
    for exact, own in zip(*results, strict=True):
        assert (own - exact).abs().max() <= 3e-6 * exact.abs().max()
    # Forward and the input gradient, in float32 only.
    assert calls == [(ROWS, 2, IN), (ROWS, 2, OUT)]


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (drawn(127, IN), drawn(OUT, IN)),
        (drawn(ROWS, 255), drawn(OUT, 255)),
        (drawn(ROWS, IN), drawn(255, IN)),
        (drawn(0, IN), drawn(OUT, IN)),
        (drawn(ROWS, IN).bfloat16(), drawn(OUT, IN).bfloat16()),
        (drawn(ROWS, IN).double(), drawn(OUT, IN).double()),
    ],
    ids=["few-rows", "few-inputs", "few-outputs", "no-rows", "bfloat16", "float64"],
)
def test_others_stay_with_torch(calls: list[torch.Size], rows: torch.Tensor, weight: torch.Tensor) -> None:
    assert torch.equal(product(rows, weight), nn.functional.linear(rows, weight))
    assert not calls


@pytest.mark.parametrize(
    ("capability", "vendor", "expected"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_the_processor_decides(monkeypatch: pytest.MonkeyPatch, capability: str, vendor: str, expected: bool) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(matrix_products.Path, "read_text", lambda _: f"vendor_id\t: {vendor}\n")
    assert matrix_products.is_onednn_faster.__wrapped__() is expected
