"""Every attention backend against dense float64 attention: output and all gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.model import dense_attention as dense
from trainer.config.sections.model import ModelConfig
from trainer.data.samples.document_places import Documents
from trainer.distributed.random_streams import MicroBatchRandomness, StepRandomness
from trainer.model.attention.core_attention import AttentionCore, attend
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.ops.attention.backend import choose_backend
from trainer.ops.attention.interface import Packing
from trainer.ops.attention.kernels import TorchEfficient, TorchFlash, TorchFlashCPU
from trainer.ops.attention.padded import Padded, PaddedPacked, fitted
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.tiled import TileAttention, Tiling, tiled_attention
from trainer.ops.attention.tiles import CAUSAL, FULL, Band, whole_tiles
from trainer.ops.attention.torch_call import has_grouped_kernel
from trainer.ops.attention.unfused import Unfused

CPU = torch.device("cpu")
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Documents that fill a sample, that have one token, that differ between samples, and that agree.
DOCUMENTS = {
    1: [((0, 1), (0, 1))],
    7: [((0, 7), (0, 3, 7)), ((0, 1, 7), (0, 1, 7))],
    123: [((0, 5, 64, 65, 123), (0, 122, 123)), ((0, 40, 123), (0, 40, 123))],
}
CASES = [(length, bounds) for length, samples in DOCUMENTS.items() for bounds in (None, *samples)]


def model(backend: str, **keys: object) -> ModelConfig:
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    return ModelConfig.model_validate({**shape, "attention_backend": backend, **keys})


def core(backend: str, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> AttentionCore:
    return AttentionCore(3, dropout, ParallelAxes(), settings(8), choose_backend(model(backend), dtype, CPU))


def settings(width: int, **others: object) -> AttentionSettings:
    """Settings for heads of this width."""
    return AttentionSettings(width**-0.5, **others)


def forward_pass(bounds: dense.Bounds | None, randomness: MicroBatchRandomness | None = None) -> ForwardPass:
    documents = None if bounds is None else Documents(tuple(map(tuple, bounds)))
    return ForwardPass(documents=documents, randomness=randomness)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("backend", ["auto", "fused", "unfused", "local"])
def test_backends_equal_dense_attention(backend: str, groups: int, dtype: torch.dtype) -> None:
    for length, bounds in CASES:
        inputs, grad = dense.heads(2, 4, groups, length, 8, dtype)
        found = dense.gradients(attend(*inputs, forward_pass(bounds), core(backend, dtype=dtype)), inputs, grad)
        expected = dense.gradients(dense.attention(*inputs, bounds), inputs, grad)
        assert dense.worst(found, expected) <= LIMITS[dtype], (length, bounds)


@pytest.mark.parametrize("kernel", [TorchFlashCPU(), Unfused(), Padded(TorchFlashCPU(), 8)], ids=type)
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_give_the_log_sum_exp(kernel, causal: bool) -> None:
    inputs, _ = dense.heads(2, 4, 2, 33, 8)
    query, key, value = (part.detach() for part in inputs)
    band = CAUSAL if causal else FULL
    output, log_sum_exp = kernel.forward(query, key, value, settings=settings(8), band=band)
    scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5
    if causal:
        scores = scores.masked_fill(~dense.mask(33, None, 2), -torch.inf)
    assert torch.allclose(log_sum_exp, scores.logsumexp(-1), rtol=0, atol=1e-12)
    assert torch.allclose(output, scores.softmax(-1) @ value.repeat_interleave(2, 1), rtol=0, atol=1e-12)


def test_dropout_has_the_mask_of_the_whole_model_within_documents() -> None:
    inputs, grad = dense.heads(2, 4, 2, 23, 8)
    randomness = StepRandomness(1, 2).micro_batch(5)
    kept = dense.kept_weights(2, 4, 23, 23, 0.3, randomness)
    # With scores in memory a few long documents share one mask, and many short ones are computed one by one.
    documents = (None, ((0, 7, 23), (0, 7, 23)), ((0, 23), (0, 1, 22, 23)), ((0, 8, 15, 23), (0, 2, 23)))
    for bounds, backend in itertools.product(documents, ("auto", "unfused")):
        found = attend(*inputs, forward_pass(bounds, randomness), core(backend, dropout=0.3))
        expected = dense.attention(*inputs, bounds, kept, 0.3)
        assert dense.worst(dense.gradients(found, inputs, grad), dense.gradients(expected, inputs, grad)) < 1e-12


def test_documents_are_as_if_alone() -> None:
    inputs, grad = dense.heads(1, 4, 2, 50, 8, torch.float32)
    together = dense.gradients(attend(*inputs, forward_pass([(0, 20, 50)]), core("fused")), inputs, grad)
    for start, stop in ((0, 20), (20, 50)):
        part = [heads.detach()[:, :, start:stop].requires_grad_() for heads in inputs]
        alone = dense.gradients(attend(*part, forward_pass(None), core("fused")), part, grad[:, :, start:stop])
        assert dense.worst([whole[:, :, start:stop] for whole in together], alone) < 1e-6


def test_no_scores_are_kept_for_backward() -> None:
    inputs, _ = dense.heads(1, 2, 2, 512, 4, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        for backend in ("fused", "unfused"):
            for bounds in (None, [(0, 100, 512)]):
                attend(*inputs, forward_pass(bounds), core(backend, dtype=torch.float32))
    assert max(kept) == 512 * 2 * 4


@pytest.mark.parametrize(
    ("kernel", "dtype", "width"),
    [
        (TorchFlash(), torch.bfloat16, 64),
        (TorchEfficient(), torch.float32, 64),
        (Padded(TorchFlash(), 8), torch.float16, 20),
    ],
    ids=["flash", "efficient", "padded"],
)
def test_calls_of_gpu_kernels_have_the_form_that_torch_declares(kernel, dtype, width) -> None:
    # Tensors without storage: the ops check their arguments and infer the shapes of their results.
    query, key = (
        torch.empty(33, 2, number, width, dtype=dtype, device="meta").permute(1, 2, 0, 3) for number in (4, 2)
    )
    for queries, band in ((query, CAUSAL), (query[:, :, 16:], FULL), (query[:, :, 16:], Band(5, 16))):
        form = {"settings": settings(width), "band": band}
        output, log_sum_exp = kernel.forward(queries, key, key, **form)
        assert output.shape == queries.shape
        assert log_sum_exp.shape == queries.shape[:3]
        assert log_sum_exp.dtype is torch.float32
        grads = kernel.backward(torch.empty_like(output), queries, key, key, output, log_sum_exp, **form)
        assert [grad.shape for grad in grads] == [queries.shape, key.shape, key.shape]


def test_the_efficient_kernel_gets_rows_without_gaps() -> None:
    # It takes the strides of all tensors but the output's rows; a tile of two samples has gaps between them.
    query = torch.empty(33, 2, 4, 64, dtype=torch.float16, device="meta").permute(1, 2, 0, 3)[:, :, 5:20]
    strides = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), more=None):
            if function is torch.ops.aten._scaled_dot_product_efficient_attention_backward.default:
                strides.append(arguments[5].stride())
            return function(*arguments, **(more or {}))

    log_sum_exp = torch.empty(query.shape[:3], device="meta")
    with Recorder():
        TorchEfficient().backward(query, query, query, query, query, log_sum_exp, settings=settings(64), band=CAUSAL)
    assert strides == [(15 * 4 * 64, 64, 4 * 64, 1)]


@pytest.mark.parametrize(("kernel", "width"), [(TorchFlash(), 64), (PaddedPacked(TorchFlash(), 8), 20)])
def test_calls_for_packed_documents_have_the_form_that_torch_declares(kernel, width) -> None:
    query, key = (
        torch.empty(33, 2, number, width, dtype=torch.bfloat16, device="meta").permute(1, 2, 0, 3) for number in (4, 2)
    )
    packing = Packing.build(whole_tiles(33, [(0, 9, 33), (0, 33)]), 2, 33, query.device)
    assert (packing.starts.shape, packing.longest) == ((4,), 33)
    for form in (settings(width), settings(width, window=7)):
        output, log_sum_exp = kernel.forward_packed(packing, query, key, key, settings=form)
        assert (output.shape, log_sum_exp.shape) == (query.shape, query.shape[:3])
        tensors = torch.empty_like(output), query, key, key, output, log_sum_exp
        grads = kernel.backward_packed(packing, *tensors, settings=form)
        assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]


def test_wide_heads_are_not_grouped_for_the_flash_kernel(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))
    for width in (256, 264):
        query = SimpleNamespace(is_cpu=False, is_cuda=True, dtype=torch.bfloat16, shape=(1, 4, 8, width), device="cuda")
        assert has_grouped_kernel(query) is (width == 256)


GPU_KERNELS = [
    (TorchFlash, torch.bfloat16, 64),
    (TorchFlash, torch.float16, 256),
    (TorchFlash, torch.bfloat16, 20),
    (TorchEfficient, torch.float32, 64),
    (TorchEfficient, torch.float16, 64),
    (TorchEfficient, torch.float32, 20),
]


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("kind", "dtype", "width"), GPU_KERNELS)
def test_gpu_kernels_equal_dense_attention(kind, dtype, width, groups) -> None:
    kernel = fitted(kind(), (width, width), 8)
    for length, bounds in CASES:
        inputs, grad = dense.heads(2, 4, groups, length, width, dtype)
        expected = dense.gradients(dense.attention(*inputs, bounds), inputs, grad)
        heads = [part.detach().cuda().requires_grad_() for part in inputs]
        attention = TileAttention(kernel, settings(width))
        output = tiled_attention(*heads, Tiling(whole_tiles(length, bounds)), attention)
        found = [part.cpu() for part in dense.gradients(output, heads, grad.cuda())]
        assert dense.worst(found, expected) <= max(LIMITS[dtype], 1e-5), (length, bounds)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype", "width"), GPU_KERNELS)
def test_gpu_kernels_give_the_log_sum_exp_of_a_part(kind, dtype, width) -> None:
    kernel = fitted(kind(), (width, width), 8)
    inputs, _ = dense.heads(2, 4, 2, 33, width, dtype)
    query, key, value = (part.detach() for part in inputs)
    query = query[:, :, 16:]
    output, log_sum_exp = kernel.forward(query.cuda(), key.cuda(), value.cuda(), settings=settings(width), band=FULL)
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT / width**0.5
    expected = scores.softmax(-1) @ value.double().repeat_interleave(2, 1)
    assert dense.worst([log_sum_exp.cpu().double()], [scores.logsumexp(-1)]) <= max(LIMITS[dtype], 1e-5)
    assert dense.worst([output.cpu().double()], [expected]) <= max(LIMITS[dtype], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_equal_dense_attention_on_a_gpu(dtype, groups) -> None:
    backend = choose_backend(model("fused"), dtype, torch.device("cuda"))
    layer = AttentionCore(3, 0.0, ParallelAxes(), settings(8), backend)
    for length, bounds in CASES:
        inputs, grad = dense.heads(2, 4, groups, length, 8, dtype)
        expected = dense.gradients(dense.attention(*inputs, bounds), inputs, grad)
        heads = [part.detach().cuda().requires_grad_() for part in inputs]
        found = dense.gradients(attend(*heads, forward_pass(bounds), layer), heads, grad.cuda())
        assert dense.worst([part.cpu() for part in found], expected) <= max(LIMITS[dtype], 1e-5), (length, bounds)
