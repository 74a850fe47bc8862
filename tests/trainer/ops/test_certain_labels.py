"""Accuracy of gradients at nearly certain labels, a difference of numbers close to 1."""

import pytest
import torch
import torch.nn.functional as F

from trainer.ops.cross_entropy import CROSS_ENTROPY, LossTerms, VocabColumns

pytestmark = pytest.mark.usefixtures("kernel_library")

FUNCTIONS = {
    "small": CROSS_ENTROPY.small,
    **{backend: CROSS_ENTROPY.implementations[backend].function for backend in ("native", "reference")},
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 1e-5])
def test_gradients_of_certain_labels_have_the_digits_of_their_dtype(dtype, function, smoothing):
    logits = torch.tensor([[9.0, 0.0, 1.0], [0.0, 8.0, 0.5]], dtype=dtype, requires_grad=True)
    exact = logits.detach().double().requires_grad_()
    labels = torch.tensor([0, 1])
    losses = FUNCTIONS[function](logits * 1, labels, VocabColumns(0, 3, 3), LossTerms(label_smoothing=smoothing))
    losses.sum().backward()
    F.cross_entropy(exact, labels, reduction="sum", label_smoothing=smoothing).backward()
    # Rounding a probability to the dtype costs its difference to 1 about 12 bits. 16-bit results round at the end.
    tolerance = (2.0**13 if losses.dtype == dtype else 2.0) * torch.finfo(dtype).eps
    smallest = float(torch.finfo(dtype).smallest_normal)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=smallest)
