"""CUDA kernels of activations on the emulated GPU: indices beyond int32."""

from __future__ import annotations

import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from tests.trainer.ops.op_checks import check_errors, drawn, sparse_tensor
from trainer.ops.activation import ACTIVATION

GATED_SILU = (0, 1)


def test_elements_beyond_2_to_the_31(emulated_cuda: EmulatedCuda) -> None:
    rows, width, dtype = 2**21 + 4, 1032, torch.bfloat16
    inner, activated = sparse_tensor((rows, 2 * width), dtype), sparse_tensor((rows, width), dtype)
    inner[-1] = drawn((2 * width,), dtype)
    with emulated_cuda.last_blocks(2):
        emulated_cuda.call("llmctl_cuda_activation", *(dtype, *GATED_SILU, inner, None, None, activated, rows, width))
    reference = ACTIVATION.implementations["reference"].function
    usual, exact = (reference(inner[-1:].to(kind), None, None, "silu", True) for kind in (dtype, torch.float64))
    check_errors([activated[-1:]], [usual], [exact])
