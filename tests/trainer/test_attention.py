"""Every attention backend against dense float64 attention: output and all gradients; and who is chosen."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace

import pytest
import torch

from tests.trainer import dense_attention as dense
from trainer.axes import ParallelAxes
from trainer.config import ModelConfig
from trainer.config_error import ConfigError
from trainer.context_parallel.tiles import whole_tiles
from trainer.data.batches import Documents
from trainer.forward_pass import ForwardPass
from trainer.layers import attention_core, flash_attn_package
from trainer.layers.attention_backend import AttentionBackend, choose_backend
from trainer.layers.attention_core import AttentionCore, _has_grouped_kernel, attend
from trainer.layers.attention_kernels import (
    Padded,
    PaddedPacked,
    TorchEfficient,
    TorchFlash,
    TorchFlashCPU,
    Unfused,
    torch_kernel,
)
from trainer.layers.dropout import draw_mask
from trainer.layers.flash_attn_package import FlashAttnPackage, find_flash_attn
from trainer.layers.tiled_attention import PackedKernel, Packing, Tiling, tiled_attention
from trainer.random_streams import MicroBatchRandomness, StepRandomness

CPU = torch.device("cpu")
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Of a document that fills a sample, of one token, of unlike and of like samples.
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
    return AttentionCore(3, dropout, ParallelAxes(), choose_backend(model(backend), dtype, CPU))


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


@pytest.mark.parametrize("kernel", [TorchFlashCPU(), Unfused(), Padded(TorchFlashCPU())], ids=type)
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_give_the_log_sum_exp(kernel, causal: bool) -> None:
    inputs, _ = dense.heads(2, 4, 2, 33, 8)
    query, key, value = (part.detach() for part in inputs)
    output, log_sum_exp = kernel.forward(query, key, value, causal=causal)
    scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5
    if causal:
        scores = scores.masked_fill(~dense.mask(33, None, 2), -torch.inf)
    assert torch.allclose(log_sum_exp, scores.logsumexp(-1), rtol=0, atol=1e-12)
    assert torch.allclose(output, scores.softmax(-1) @ value.repeat_interleave(2, 1), rtol=0, atol=1e-12)


def test_dropout_has_the_mask_of_the_whole_model_within_documents() -> None:
    inputs, grad = dense.heads(2, 4, 2, 23, 8)
    randomness = StepRandomness(1, 2).micro_batch(5)
    masks = [
        draw_mask((2, 23, 23), 0.3, randomness.dropout_generator(CPU, "attention", 3, part=head)) for head in range(4)
    ]
    kept = torch.stack(masks, dim=1)
    for bounds in (None, ((0, 7, 23), (0, 7, 23)), ((0, 23), (0, 1, 22, 23))):
        found = attend(*inputs, forward_pass(bounds, randomness), core("auto", dropout=0.3))
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


@pytest.fixture(autouse=True)
def _forget_what_was_found():
    find_flash_attn.cache_clear()
    yield
    find_flash_attn.cache_clear()


class TestFlashAttn:
    """The package is not here: a module of the same signatures, computed densely, shows what it would be handed."""

    def test_unable_by_name_is_refused_with_the_cure(self) -> None:
        with pytest.raises(ConfigError) as caught:
            choose_backend(model("flash"), torch.bfloat16, CPU)
        assert str(caught.value) == (
            "model.attention_backend: flash is unable: runs on NVIDIA GPUs alone, and the device is cpu; use fused, "
            "which is torch's own, or auto"
        )
        assert choose_backend(model("auto"), torch.bfloat16, CPU).name == "fused"

    @pytest.mark.parametrize(
        ("dtype", "width", "says"),
        [
            (torch.float32, 64, "bf16 or fp16 alone"),
            (torch.bfloat16, 100, "multiples of 8, not 100"),
            (torch.bfloat16, 512, "up to 256"),
            (torch.bfloat16, 64, "needs compute capability 8.0, which this GPU is below"),
        ],
    )
    def test_what_it_cannot_is_found_without_importing_it(self, dtype, width, says, monkeypatch) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (7, 0))
        found = find_flash_attn.__wrapped__(2, dtype, width, torch.device("cuda"))
        assert isinstance(found, str)
        assert re.search(says, found)

    def test_a_package_that_cannot_be_loaded_is_explained(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))
        monkeypatch.setitem(flash_attn_package._MODULES, 2, "flash_attn_absent.flash_attn_interface")
        find = find_flash_attn.__wrapped__
        assert find(2, torch.bfloat16, 64, torch.device("cuda")) == "is not installed (no package flash_attn_absent)"
        (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: x\\nmore')\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert find(3, torch.bfloat16, 64, torch.device("cuda")) == "does not run here: undefined symbol: x"
        with pytest.raises(ConfigError) as caught:
            choose_backend(model("flash"), torch.bfloat16, torch.device("cuda"))
        assert str(caught.value) == (
            "model.attention_backend: flash is unable: flash-attn 3 does not run here: undefined symbol: x, and "
            "flash-attn 2 is not installed (no package flash_attn_absent); use fused, which is torch's own, or auto"
        )

    @pytest.mark.parametrize("version", [2, 3])
    def test_calls(self, version) -> None:
        kernel = FlashAttnPackage(version, DENSE_MODULES[version])
        for length, bounds in CASES:
            inputs, grad = dense.heads(2, 4, 2, length, 8)
            output = tiled_attention(*inputs, Tiling(whole_tiles(length, bounds)), kernel)
            expected = dense.gradients(dense.attention(*inputs, bounds), inputs, grad)
            assert dense.worst(dense.gradients(output, inputs, grad), expected) < 1e-12, (length, bounds)


@pytest.mark.parametrize(
    ("kernel", "dtype", "width"),
    [
        (TorchFlash(0.1), torch.bfloat16, 64),
        (TorchEfficient(0.1), torch.float32, 64),
        (Padded(TorchFlash(0.1)), torch.float16, 20),
    ],
    ids=["flash", "efficient", "padded"],
)
def test_calls_of_gpu_kernels_have_the_form_that_torch_declares(kernel, dtype, width) -> None:
    # Tensors without storage: the operators check their arguments and tell the shapes of their results.
    query, key = (
        torch.empty(33, 2, number, width, dtype=dtype, device="meta").permute(1, 2, 0, 3) for number in (4, 2)
    )
    for queries, causal in ((query, True), (query[:, :, 16:], False)):
        output, log_sum_exp = kernel.forward(queries, key, key, causal=causal)
        assert output.shape == queries.shape
        assert log_sum_exp.shape == queries.shape[:3]
        assert log_sum_exp.dtype is torch.float32
        grads = kernel.backward(torch.empty_like(output), queries, key, key, output, log_sum_exp, causal=causal)
        assert [grad.shape for grad in grads] == [queries.shape, key.shape, key.shape]


@pytest.mark.parametrize(("kernel", "width"), [(TorchFlash(0.1), 64), (PaddedPacked(TorchFlash(0.1)), 20)])
def test_calls_for_packed_documents_have_the_form_that_torch_declares(kernel, width) -> None:
    query, key = (
        torch.empty(33, 2, number, width, dtype=torch.bfloat16, device="meta").permute(1, 2, 0, 3) for number in (4, 2)
    )
    packing = Packing.build(whole_tiles(33, [(0, 9, 33), (0, 33)]), 2, 33, query.device)
    assert (packing.starts.shape, packing.longest) == ((4,), 33)
    output, log_sum_exp = kernel.forward_packed(packing, query, key, key)
    assert (output.shape, log_sum_exp.shape) == (query.shape, query.shape[:3])
    grads = kernel.backward_packed(packing, torch.empty_like(output), query, key, key, output, log_sum_exp)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]


def test_heads_that_flash_does_not_take_are_not_left_to_it_in_groups(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))
    for width in (256, 264):
        query = SimpleNamespace(is_cpu=False, is_cuda=True, dtype=torch.bfloat16, shape=(1, 4, 8, width), device="cuda")
        assert _has_grouped_kernel(query) is (width == 256)


def test_tiles_are_worked_out_once_for_all_layers_and_replays(monkeypatch) -> None:
    made = []
    for owner, name in ((attention_core, "whole_tiles"), (Packing, "build")):
        plain = getattr(owner, name)
        counting = lambda *a, name=name, plain=plain: made.append(name) or plain(*a)  # noqa: E731
        monkeypatch.setattr(owner, name, counting)
    packed = AttentionCore(3, 0.0, ParallelAxes(), AttentionBackend("flash", FlashAttnPackage(2, DENSE_MODULES[2])))
    for _ in range(2):
        one = forward_pass(DOCUMENTS[7][0])
        for layer in (packed, core("fused"), packed):
            inputs, grad = dense.heads(2, 4, 2, 7, 8)
            dense.gradients(attend(*inputs, one, layer), inputs, grad)
    assert made == ["whole_tiles", "build"] * 2


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
    kernel = kind(width**-0.5)
    if width % 8:
        kernel = PaddedPacked(kernel) if kind is TorchFlash else Padded(kernel)
    for length, bounds in CASES:
        inputs, grad = dense.heads(2, 4, groups, length, width, dtype)
        expected = dense.gradients(dense.attention(*inputs, bounds), inputs, grad)
        heads = [part.detach().cuda().requires_grad_() for part in inputs]
        output = tiled_attention(*heads, Tiling(whole_tiles(length, bounds)), kernel)
        found = [part.cpu() for part in dense.gradients(output, heads, grad.cuda())]
        assert dense.worst(found, expected) <= max(LIMITS[dtype], 1e-5), (length, bounds)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype", "width"), GPU_KERNELS)
def test_gpu_kernels_give_the_log_sum_exp_of_a_part(kind, dtype, width) -> None:
    kernel = kind(width**-0.5) if width % 8 == 0 else Padded(kind(width**-0.5))
    inputs, _ = dense.heads(2, 4, 2, 33, width, dtype)
    query, key, value = (part.detach() for part in inputs)
    query = query[:, :, 16:]
    output, log_sum_exp = kernel.forward(query.cuda(), key.cuda(), value.cuda(), causal=False)
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT / width**0.5
    expected = scores.softmax(-1) @ value.double().repeat_interleave(2, 1)
    assert dense.worst([log_sum_exp.cpu().double()], [scores.logsumexp(-1)]) <= max(LIMITS[dtype], 1e-5)
    assert dense.worst([output.cpu().double()], [expected]) <= max(LIMITS[dtype], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_equal_dense_attention_on_a_gpu(dtype, groups) -> None:
    backend = choose_backend(model("fused"), dtype, torch.device("cuda"))
    layer = AttentionCore(3, 0.0, ParallelAxes(), backend)
    for length, bounds in CASES:
        inputs, grad = dense.heads(2, 4, groups, length, 8, dtype)
        expected = dense.gradients(dense.attention(*inputs, bounds), inputs, grad)
        heads = [part.detach().cuda().requires_grad_() for part in inputs]
        found = dense.gradients(attend(*heads, forward_pass(bounds), layer), heads, grad.cuda())
        assert dense.worst([part.cpu() for part in found], expected) <= max(LIMITS[dtype], 1e-5), (length, bounds)


def test_gpus_get_what_they_are_able_to(monkeypatch) -> None:
    cuda, chosen = torch.device("cuda"), {}
    for capability in ((7, 0), (8, 0), (9, 0)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device, capability=capability: capability)
        for dtype in LIMITS:
            kernel = torch_kernel(dtype, 64, cuda)
            chosen[capability, dtype] = None if kernel is None else type(kernel).__name__
    assert chosen[(7, 0), torch.float16] == chosen[(7, 0), torch.float32] == "TorchEfficient"
    assert chosen[(8, 0), torch.bfloat16] == chosen[(9, 0), torch.float16] == "TorchFlash"
    assert chosen[(7, 0), torch.bfloat16] is None
    assert chosen[(9, 0), torch.float64] is None
    assert isinstance(torch_kernel(torch.bfloat16, 100, cuda), PaddedPacked)
    assert isinstance(torch_kernel(torch.bfloat16, 64, cuda), PackedKernel)
    assert not isinstance(torch_kernel(torch.float32, 100, cuda), PackedKernel)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (7, 0))
    assert choose_backend(model("auto"), torch.bfloat16, cuda).name == "unfused"
    with pytest.raises(ConfigError, match="fused is unable: torch has no kernel for bfloat16 on this cuda device"):
        choose_backend(model("fused"), torch.bfloat16, cuda)


def _documents(starts, longest):
    ends = starts.tolist()
    assert max(stop - start for start, stop in zip(ends, ends[1:], strict=False)) == longest
    return [ends]


def _forward(query, key, value, scale, causal, starts=None, longest=None):
    """Output [B, S, A, D] and log-sum-exp [B, A, S]; packed: [N, A, D] and [A, N]."""
    assert causal
    assert scale == query.shape[-1] ** -0.5
    packed = starts is not None
    heads = [(part.unsqueeze(0) if packed else part).transpose(1, 2) for part in (query, key, value)]
    bounds = _documents(starts, longest) if packed else None
    output = dense.attention(*heads, bounds).transpose(1, 2)
    scores = heads[0] @ heads[1].repeat_interleave(heads[0].shape[1] // heads[1].shape[1], 1).mT * scale
    sums = scores.masked_fill(~dense.mask(scores.shape[-1], bounds, len(scores)), -torch.inf).logsumexp(-1)
    return (output[0], sums[0]) if packed else (output, sums)


def _backward(grad, query, key, value, output, sums, grads, scale, causal, starts=None, longest=None):
    inputs = [part.detach().requires_grad_() for part in (query, key, value)]
    with torch.enable_grad():
        again, sums_again = _forward(*inputs, scale, causal, starts, longest)
    assert torch.allclose(again, output)
    assert torch.allclose(sums_again, sums)
    assert sums.is_contiguous()
    for target, gradient in zip(grads, torch.autograd.grad(again, inputs, grad), strict=True):
        target.copy_(gradient)


def _taking(signature, function):
    """A function of exactly these parameters, of which those in parentheses may be left out."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name.strip("()"), kinds, default=None if "(" in name else inspect.Parameter.empty)
        for name in signature.split()
    ]
    return lambda *args, **kwargs: function(inspect.Signature(parameters).bind(*args, **kwargs).arguments)


def _fake_forward(given):
    assert given.get("dropout_p", 0.0) == given.get("softcap", 0.0) == 0.0
    assert given.get("window_size_left", -1) == given.get("window_size_right", -1) == -1
    assert given.get("cu_seqlens_q") is given.get("cu_seqlens_k")
    packing = given.get("cu_seqlens_q"), given.get("max_seqlen_q")
    heads = given["q"], given["k"], given["v"]
    return *_forward(*heads, given["softmax_scale"], given["causal"], *packing), None, None


def _fake_backward(given):
    assert given.get("dropout_p", 0.0) == given.get("softcap", 0.0) == 0.0
    assert given.get("cu_seqlens_q") is given.get("cu_seqlens_k")
    assert given["deterministic"] is False
    packing = given.get("cu_seqlens_q"), given.get("max_seqlen_q")
    tensors = [given[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")]
    grads = given["dq"], given["dk"], given["dv"]
    _backward(*tensors, grads, given["softmax_scale"], given.get("causal", given.get("is_causal")), *packing)


# As in flash-attn 2.8 and in the hopper folder.
OFF_2 = "window_size_left window_size_right softcap alibi_slopes"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
DENSE_MODULES = {
    2: SimpleNamespace(
        _flash_attn_forward=_taking(f"q k v dropout_p softmax_scale causal {OFF_2} return_softmax", _fake_forward),
        _flash_attn_backward=_taking(
            f"dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal {OFF_2} deterministic (rng_state)",
            _fake_backward,
        ),
        _flash_attn_varlen_forward=_taking(
            f"q k v {LENGTHS} dropout_p softmax_scale causal {OFF_2} return_softmax (block_table)", _fake_forward
        ),
        _flash_attn_varlen_backward=_taking(
            f"dout q k v out softmax_lse dq dk dv {LENGTHS} dropout_p softmax_scale causal {OFF_2} deterministic "
            "(rng_state)",
            _fake_backward,
        ),
    ),
    3: SimpleNamespace(
        _flash_attn_forward=_taking(
            "q k v (k_new) (v_new) (qv) (out_) (cu_seqlens_q) (cu_seqlens_k) (cu_seqlens_k_new) (seqused_q) "
            "(seqused_k) (max_seqlen_q) (max_seqlen_k) (softmax_scale) (causal)",
            _fake_forward,
        ),
        _flash_attn_backward=_taking(
            "dout q k v out softmax_lse (cu_seqlens_q) (cu_seqlens_k) (sequed_q) (sequed_k) (max_seqlen_q) "
            "(max_seqlen_k) (dq) (dk) (dv) (softmax_scale) (is_causal) (deterministic)",
            _fake_backward,
        ),
    ),
}
