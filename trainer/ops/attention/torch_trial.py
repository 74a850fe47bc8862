"""A trial of torch's fused attention on a GPU at the run's own shape, before the first step.

torch chooses one of several kernels for a shape. That of cuDNN may refuse the shape only once it has built a plan for
it, with an exception; torch then has others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend

from trainer.ops.attention.backend import choose_backend
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.torch_call import torch_attention
from trainer.planning.parts.attention import kernel_widths

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.ops.attention.flash_attn import FlashAttnPackage

_NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN's",
    SDPBackend.FLASH_ATTENTION: "FlashAttention-2",
    SDPBackend.EFFICIENT_ATTENTION: "the memory-efficient one",
    SDPBackend.MATH: "none: it keeps all scores of a layer, which takes memory by the square of the length",
}
_LONGEST = 200
"""Characters of cuDNN's reason."""

Attend = Callable[..., torch.Tensor]
"""(query, key, value, settings, dropout) -> the context."""


def try_run(
    config: TrainConfig, flash_attn: FlashAttnPackage | str | None, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """Notes on torch's own attention, if the layers of the run use it on this GPU; else none.

    Where cuDNN refuses the shape, its kernel is switched off in this process. No communication: ranks have the same
    shape.

    Args:
        config: the training config.
        flash_attn: the package that all ranks have, or the reason for having none.
        dtype: dtype of the activations.
        device: device of this rank.
    """
    model, parallel = config.model, config.parallel
    key_width, value_width = kernel_widths(model)
    is_ring = parallel.context_parallel_size > 1 and parallel.cp_comm_type == "p2p"
    if device.type != "cuda" or model.is_encoder_decoder or is_ring or key_width != value_width:
        return []
    settings = AttentionSettings.of(model, 0).within(config.training.seq_length)
    backend = choose_backend(model, dtype, device, flash_attn)
    if backend.name != "fused" or not (settings.is_plain or not settings.causal):
        return []
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    batch, length = config.training.micro_batch_size, config.training.seq_length
    query, key, value = (
        torch.zeros((batch, max(1, heads // ranks), length, key_width), dtype=dtype, device=device, requires_grad=True)
        for heads in (model.num_attention_heads, model.query_groups, model.query_groups)
    )
    return try_attention(query, key, value, settings, model.attention_dropout)


def try_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    settings: AttentionSettings,
    dropout: float,
    attend: Attend = torch_attention,
) -> list[str]:
    """Notes on one forward and backward of queries [B, A, S, D] over keys and values [B, G, S, D] with gradients.

    Raises:
        RuntimeError: torch has no kernel that takes the shape.
    """
    notes = []

    def run() -> None:
        torch.autograd.backward(attend(query, key, value, settings, dropout).sum())

    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
        run()
        reason = " ".join(str(error).split())[:_LONGEST]
        notes.append(f"attention: cuDNN's kernel is left out, which refuses the shape of this run: {reason}")
    chosen = SDPBackend(
        torch._fused_sdp_choice(
            query, key, value, dropout_p=dropout, is_causal=settings.causal, enable_gqa=query.shape[1] != key.shape[1]
        )
    )
    return [*notes, f"attention: torch's kernel is {_NAMES.get(chosen, chosen.name)}"]
