"""The trial of torch's attention before the first step. On a CPU, whose kernels are chosen in the same way."""

import pytest
import torch

from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.torch_call import torch_attention
from trainer.ops.attention.torch_trial import try_attention, try_run
from trainer.planning.build_config import build_config


def heads(number: int) -> torch.Tensor:
    return torch.zeros((2, number, 16, 8), requires_grad=True)


@pytest.fixture
def settings() -> AttentionSettings:
    model = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    return AttentionSettings.of(config_of(model).model, 0)


def config_of(model):
    return build_config({"model": model, "training": {"train_iters": 1, "seq_length": 16}, "optimizer": {"lr": 1e-3}})


def test_the_kernel_is_named(settings):
    assert try_attention(heads(4), heads(2), heads(2), settings, 0.0) == [
        "attention: torch's kernel is FlashAttention-2"
    ]


def test_a_kernel_that_refuses_the_shape_is_left_out(settings):
    """The first call fails as cuDNN's plan does; the others of torch take the shape."""
    calls = []

    def attend(*arguments):
        calls.append(torch.backends.cuda.cudnn_sdp_enabled())
        if len(calls) == 1:
            raise RuntimeError("cuDNN Frontend error: no\n  engine")
        return torch_attention(*arguments)

    try:
        notes = try_attention(heads(4), heads(4), heads(4), settings, 0.0, attend)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    assert len(calls) == 2 and calls[1] is False
    assert notes[0].endswith("refuses the shape of this run: cuDNN Frontend error: no engine")
    assert notes[1] == "attention: torch's kernel is FlashAttention-2"


def test_memory_that_is_short_is_no_reason_to_leave_a_kernel_out(settings):
    def attend(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        try_attention(heads(4), heads(4), heads(4), settings, 0.0, attend)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_nothing_is_tried_on_a_cpu():
    config = config_of({"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4})
    assert not try_run(config, None, torch.float32, torch.device("cpu"))
