"""Choice of the attention backend per device, and the calls of flash-attn."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.model import dense_attention as dense
from tests.trainer.model.test_attention import CASES, CPU, DOCUMENTS, LIMITS, core, forward_pass, model, settings
from tests.waiting import HANG_S
from trainer.config.errors import ConfigError
from trainer.model.attention import core_attention
from trainer.model.attention.core_attention import AttentionCore, attend
from trainer.model.context import ParallelAxes
from trainer.ops.attention import flash_attn
from trainer.ops.attention.backend import AttentionBackend, check_backend, choose_backend
from trainer.ops.attention.flash_attn import FlashAttnPackage, _try_out, find_flash_attn, try_in_process, unsuited
from trainer.ops.attention.interface import PackedKernel, Packing
from trainer.ops.attention.kernels import torch_kernel
from trainer.ops.attention.padded import PaddedPacked
from trainer.ops.attention.tiled import TileAttention, Tiling, tiled_attention
from trainer.ops.attention.tiles import whole_tiles

CUDA = torch.device("cuda")
WIDE = (64, 64), settings(64)


@pytest.fixture(autouse=True)
def _forget_what_was_found():
    find_flash_attn.cache_clear()
    yield
    find_flash_attn.cache_clear()


class TestFlashAttn:
    """Dense modules with flash-attn's signatures stand in for the package, which is not installed."""

    def test_flash_by_name_is_refused_with_a_remedy(self) -> None:
        with pytest.raises(ConfigError) as caught:
            choose_backend(model("flash"), torch.bfloat16, CPU)
        assert str(caught.value) == (
            "model.attention_backend: flash cannot run here: runs only on NVIDIA GPUs, and the device is cpu; "
            "use fused, torch's own kernel, or auto"
        )
        assert choose_backend(model("auto"), torch.bfloat16, CPU).name == "fused"

    def test_settings_that_no_package_supports_are_refused_before_any_trial(self, tmp_path, monkeypatch) -> None:
        for backend in ("auto", "fused", "unfused"):
            check_backend(model(backend), torch.bfloat16, CPU)
        with pytest.raises(ConfigError, match="flash cannot run here: runs only on NVIDIA GPUs"):
            check_backend(model("flash"), torch.bfloat16, CPU)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))
        with pytest.raises(ConfigError, match="flash-attn 3 is not installed .*, and flash-attn 2 is not installed"):
            check_backend(model("flash"), torch.bfloat16, CUDA)
        (tmp_path / "flash_attn_interface.py").write_text("raise SystemExit('it was run')\n")
        monkeypatch.syspath_prepend(tmp_path)
        check_backend(model("flash"), torch.bfloat16, CUDA)

    def test_the_agreed_version_is_used(self) -> None:
        kernels = FlashAttnPackage(2, DENSE_MODULES[2])
        assert choose_backend(model("auto"), torch.bfloat16, CPU, kernels).kernel is kernels
        assert choose_backend(model("auto"), torch.bfloat16, CPU, "fails on rank 3").name == "fused"
        with pytest.raises(ConfigError, match="flash cannot run here: fails on rank 3; use fused"):
            choose_backend(model("flash"), torch.bfloat16, CPU, "fails on rank 3")

    @pytest.mark.parametrize(
        ("version", "capability", "dtype", "width", "says"),
        [
            (2, (9, 0), torch.float32, 64, "only in bf16 or fp16"),
            (2, (9, 0), torch.bfloat16, 100, "multiple of 8 up to 256, not 100"),
            (2, (9, 0), torch.bfloat16, 512, "up to 256"),
            (2, (7, 5), torch.bfloat16, 64, r"needs compute capability 8\.0 or higher, and this GPU has 7\.5"),
            (
                3,
                (8, 9),
                torch.bfloat16,
                64,
                r"runs only on Hopper GPUs .compute capability 9.x., and this GPU has 8\.9",
            ),
            # A failed launch on this GPU would end the process.
            (
                3,
                (10, 0),
                torch.bfloat16,
                64,
                r"runs only on Hopper GPUs .compute capability 9.x., and this GPU has 10\.0",
            ),
        ],
    )
    def test_unsupported_settings_are_found_without_importing_it(
        self, version, capability, dtype, width, says, monkeypatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: capability)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: pytest.fail(f"looked for {name}"))
        found = find_flash_attn.__wrapped__(version, dtype, (width, width), settings(width), CUDA)
        assert isinstance(found, str)
        assert re.search(says, found)

    def test_nothing_of_it_is_imported_for_another_backend(self, tmp_path, monkeypatch) -> None:
        note = tmp_path / "imported"
        (tmp_path / "flash_attn_interface.py").write_text(f"open({str(note)!r}, 'w')\nraise ImportError('no')\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))
        for backend in ("fused", "unfused", "local"):
            choose_backend(model(backend), torch.bfloat16, CUDA)
        assert not note.exists()
        assert choose_backend(model("auto"), torch.bfloat16, CUDA).name == "fused"
        assert note.exists() and "flash_attn_interface" not in sys.modules

    @pytest.mark.parametrize(
        "call", ["_flash_attn_varlen_forward", "_flash_attn_varlen_backward", "_flash_attn_forward"]
    )
    def test_every_call_is_tried_out(self, call) -> None:
        whole, heads = DENSE_MODULES[2], torch.ones(1, 2, 16, 8, dtype=torch.float64)
        for form in (settings(8), settings(8, window=3, softcap=2.0)):
            _try_out(FlashAttnPackage(2, whole), heads, heads, form)
            _try_out(FlashAttnPackage(3, DENSE_MODULES[3]), heads, heads, form)
        without = SimpleNamespace(**{name: value for name, value in vars(whole).items() if name != call})
        with pytest.raises(AttributeError, match=call):
            _try_out(FlashAttnPackage(2, without), heads, heads, settings(8))

    def test_a_package_that_cannot_be_loaded_is_explained(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))
        monkeypatch.setitem(flash_attn._MODULES, 2, "flash_attn_absent.flash_attn_interface")
        find = find_flash_attn.__wrapped__
        assert find(2, torch.bfloat16, *WIDE, CUDA) == "is not installed (no package flash_attn_absent)"
        (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: x')\n")
        monkeypatch.syspath_prepend(tmp_path)
        says = "does not run here: it was built for another torch than the installed one (ImportError: undefined"
        assert find(3, torch.bfloat16, *WIDE, CUDA) == f"{says} symbol: x)"
        with pytest.raises(ConfigError) as caught:
            choose_backend(model("flash"), torch.bfloat16, CUDA)
        assert str(caught.value) == (
            f"model.attention_backend: flash cannot run here: flash-attn 3 {says} symbol: x), and "
            "flash-attn 2 is not installed (no package flash_attn_absent); use fused, torch's own kernel, or auto"
        )

    @pytest.mark.parametrize(
        ("program", "limit_s", "says"),
        [
            (
                "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
                HANG_S,
                "does not run here: using it ended in SIGSEGV",
            ),
            ("import time\ntime.sleep(6000)\n", 3, "does not run here: using it took longer than 3 s"),
            # The import succeeds, and the first call ends the process.
            (
                "import os\ndef _flash_attn_forward(*_, **__): os.abort()\n"
                "import torch\ntorch.ones = lambda *shape, dtype, device: torch.zeros(shape, dtype=dtype)\n",
                HANG_S,
                "does not run here: using it ended in SIGABRT",
            ),
        ],
    )
    def test_a_package_that_crashes_or_hangs_ends_no_other_process(
        self, program, limit_s, says, tmp_path, monkeypatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (9, 0))
        (tmp_path / "flash_attn_interface.py").write_text(program)
        monkeypatch.syspath_prepend(tmp_path)
        assert unsuited(3, torch.bfloat16, 64, CUDA) is None
        assert try_in_process(3, torch.bfloat16, *WIDE, CUDA, limit_s) == says

    @pytest.mark.parametrize("version", [2, 3])
    @pytest.mark.parametrize("form", [{}, {"window": 5}, {"softcap": 1.5}, {"causal": False}], ids=str)
    def test_calls(self, version, form) -> None:
        kernel = TileAttention(FlashAttnPackage(version, DENSE_MODULES[version]), settings(8, **form))
        mask = {name: value for name, value in form.items() if name != "softcap"}
        for length, bounds in CASES:
            inputs, grad = dense.heads(2, 4, 2, length, 8)
            output = tiled_attention(*inputs, Tiling(whole_tiles(length, bounds, **mask)), kernel)
            expected = dense.gradients(dense.attention(*inputs, bounds, **form), inputs, grad)
            assert dense.worst(dense.gradients(output, inputs, grad), expected) < 1e-12, (length, bounds)

    def test_windows_of_a_cache_end_with_its_last_key(self) -> None:
        inputs, grad = dense.heads(2, 4, 2, 3, 8, keys=11)
        for version, form in itertools.product((2, 3), ({}, {"window": 4})):
            kernel = TileAttention(FlashAttnPackage(version, DENSE_MODULES[version]), settings(8, **form))
            output = tiled_attention(*inputs, Tiling(whole_tiles(3, None, 11, **form)), kernel)
            expected = dense.gradients(dense.attention(*inputs, **form), inputs, grad)
            assert dense.worst(dense.gradients(output, inputs, grad), expected) < 1e-12


def test_every_gpu_gets_a_kernel_that_it_supports(monkeypatch) -> None:
    chosen = {}
    for capability in ((7, 0), (8, 0), (9, 0)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device, capability=capability: capability)
        for dtype in LIMITS:
            kernel = torch_kernel(dtype, (64, 64), CUDA)
            chosen[capability, dtype] = None if kernel is None else type(kernel).__name__
    assert chosen[(7, 0), torch.float16] == chosen[(7, 0), torch.float32] == "TorchEfficient"
    assert chosen[(8, 0), torch.bfloat16] == chosen[(9, 0), torch.float16] == "TorchFlash"
    assert chosen[(7, 0), torch.bfloat16] is None
    assert chosen[(9, 0), torch.float64] is None
    assert isinstance(torch_kernel(torch.bfloat16, (100, 100), CUDA), PaddedPacked)
    assert isinstance(torch_kernel(torch.bfloat16, (64, 64), CUDA), PackedKernel)
    assert not isinstance(torch_kernel(torch.float32, (100, 100), CUDA), PackedKernel)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (7, 0))
    assert choose_backend(model("auto"), torch.bfloat16, CUDA).name == "unfused"
    with pytest.raises(
        ConfigError, match="fused cannot run here: torch has no kernel for bfloat16 on this cuda device"
    ):
        choose_backend(model("fused"), torch.bfloat16, CUDA)


def test_tiles_are_computed_once_for_all_layers_and_replays(monkeypatch) -> None:
    made = []
    for owner, name in ((core_attention, "whole_tiles"), (Packing, "build")):
        plain = getattr(owner, name)
        counting = lambda *a, name=name, plain=plain, **k: made.append(name) or plain(*a, **k)  # noqa: E731
        monkeypatch.setattr(owner, name, counting)
    backend = AttentionBackend("flash", FlashAttnPackage(2, DENSE_MODULES[2]))
    packed = AttentionCore(3, 0.0, ParallelAxes(), settings(8), backend)
    for _ in range(2):
        one = forward_pass(DOCUMENTS[7][0])
        for layer in (packed, core("fused"), packed):
            inputs, grad = dense.heads(2, 4, 2, 7, 8)
            dense.gradients(attend(*inputs, one, layer), inputs, grad)
    assert made == ["whole_tiles", "build"] * 2


def _documents(starts, longest):
    ends = starts.tolist()
    assert max(stop - start for start, stop in zip(ends, ends[1:], strict=False)) == longest
    return [ends]


def _forward(query, key, value, form, starts=None, longest=None):
    """Output [B, S, A, D] and log-sum-exp [B, A, S]; packed: [N, A, D] and [A, N]."""
    packed = starts is not None
    heads = [(part.unsqueeze(0) if packed else part).transpose(1, 2) for part in (query, key, value)]
    queries, keys = heads[0].shape[2], heads[1].shape[2]
    bounds = _documents(starts, longest) if packed else None
    scores = heads[0] @ heads[1].repeat_interleave(heads[0].shape[1] // heads[1].shape[1], 1).mT * form["scale"]
    if form["softcap"]:
        scores = form["softcap"] * torch.tanh(scores / form["softcap"])
    # The manual of flash-attn: query i sees keys from i + K - Q - left to i + K - Q + right.
    own, others = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = dense.mask(queries, bounds, len(scores), keys, causal=form["causal"])
    if form["left"] >= 0:
        seen = seen & (others >= own - form["left"])
    if form["right"] >= 0:
        seen = seen & (others <= own + form["right"])
    scores = scores.masked_fill(~seen, -torch.inf)
    values = heads[2].repeat_interleave(heads[0].shape[1] // heads[2].shape[1], 1)
    output, sums = (scores.softmax(-1) @ values).transpose(1, 2), scores.logsumexp(-1)
    return (output[0], sums[0]) if packed else (output, sums)


def _backward(grad, query, key, value, output, sums, grads, form, starts=None, longest=None):
    inputs = [part.detach().requires_grad_() for part in (query, key, value)]
    with torch.enable_grad():
        again, sums_again = _forward(*inputs, form, starts, longest)
    assert torch.allclose(again, output)
    assert torch.allclose(sums_again, sums)
    assert sums.is_contiguous()
    for target, gradient in zip(grads, torch.autograd.grad(again, inputs, grad), strict=True):
        target.copy_(gradient)


def _taking(signature, function):
    """A function with exactly these parameters; parameters in parentheses are optional."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name.strip("()"), kinds, default=None if "(" in name else inspect.Parameter.empty)
        for name in signature.split()
    ]
    return lambda *args, **kwargs: function(inspect.Signature(parameters).bind(*args, **kwargs).arguments)


def _form(given):
    assert given.get("dropout_p", 0.0) == 0.0
    assert given.get("cu_seqlens_q") is given.get("cu_seqlens_k")
    return {
        "scale": given["softmax_scale"],
        "causal": given.get("causal", given.get("is_causal")),
        "left": given.get("window_size_left", -1),
        "right": given.get("window_size_right", -1),
        "softcap": given.get("softcap", 0.0),
    }


def _fake_forward(given):
    packing = given.get("cu_seqlens_q"), given.get("max_seqlen_q")
    return *_forward(given["q"], given["k"], given["v"], _form(given), *packing), None, None


def _fake_backward(given):
    assert given["deterministic"] is False
    packing = given.get("cu_seqlens_q"), given.get("max_seqlen_q")
    tensors = [given[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")]
    _backward(*tensors, (given["dq"], given["dk"], given["dv"]), _form(given), *packing)


# Signatures of flash-attn 2.8 and of the hopper folder.
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
            "(seqused_k) (max_seqlen_q) (max_seqlen_k) (softmax_scale) (causal) (window_size_left) (window_size_right) "
            "(softcap)",
            _fake_forward,
        ),
        _flash_attn_backward=_taking(
            "dout q k v out softmax_lse (cu_seqlens_q) (cu_seqlens_k) (sequed_q) (sequed_k) (max_seqlen_q) "
            "(max_seqlen_k) (dq) (dk) (dv) (softmax_scale) (is_causal) (window_size_left) (window_size_right) "
            "(softcap) (deterministic)",
            _fake_backward,
        ),
    ),
}
