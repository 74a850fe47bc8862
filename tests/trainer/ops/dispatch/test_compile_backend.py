"""The backend compile: on request on CPUs, and after the native kernels on GPUs."""

from dataclasses import replace

import pytest
import torch

from tests.trainer.ops.dispatch.test_selection import AUTO, NO_COMPILER, chosen, reference
from trainer.config.errors import ConfigError
from trainer.ops.dispatch import selection as choice_module
from trainer.ops.dispatch.selection import choose_kernels
from trainer.ops.dispatch.self_test import self_test
from trainer.ops.rms_norm import RMS_NORM
from trainer.planning.kernel_choice import RequestedBackend

COMPILE = RequestedBackend("compile", "training.kernel_backends.rms_norm", True)


@pytest.fixture
def inductor(tmp_path, monkeypatch):
    """torch.compile with a separate cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()


@pytest.mark.proof
@pytest.mark.usefixtures("inductor")
def test_torch_compiles_the_reference_on_request():
    found = chosen({"rms_norm": COMPILE})
    assert found.lines() == ["kernels: compile for rms_norm"]
    function = found.kernels[RMS_NORM]
    # The size of the example, which is in the cache.
    hidden, weight = torch.randn(3, 41, requires_grad=True), torch.ones(41, requires_grad=True)
    ours, theirs = (
        torch.autograd.grad(run(hidden, weight, 1e-5).square().sum(), (hidden, weight)) for run in (function, reference)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("inductor")
def test_without_its_compiler_torch_compiles_nothing(monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/no/compiler"))
    with pytest.raises(ConfigError, match=r"rms_norm cannot run on compile: .*No working C\+\+ compiler.*to auto"):
        chosen({"rms_norm": COMPILE})


def test_one_example_of_each_operation_is_compiled():
    """An example takes seconds, and does not test the code for another size."""

    def refused(*_):
        raise AssertionError("a further example was drawn")

    backends = {"compile": RMS_NORM.implementations["reference"], "reference": RMS_NORM.implementations["reference"]}
    operation = replace(RMS_NORM, implementations=backends, examples=[RMS_NORM.examples[0], refused])
    assert self_test(operation, "compile", torch.device("cpu"), torch.float32) is None


def test_on_gpus_compile_comes_after_native(monkeypatch):
    """On a failure a line reports the reason, and the reference runs."""
    cuda, tried = torch.device("cuda", 0), []

    def tested(operation, backend, _device, _dtype):
        tried.append((operation.name, backend))
        return "TritonMissing: Cannot find a working triton installation." if fails else None

    monkeypatch.setattr(choice_module, "self_test", tested)
    requested = {"activation": AUTO, "scaled_causal_softmax": AUTO}
    fails = False
    found = choose_kernels(requested, NO_COMPILER, cuda, torch.float32, is_alone=True)
    assert set(found.backends.values()) == {"compile"} and len(tried) == 2
    fails = True
    found = choose_kernels(requested, NO_COMPILER, cuda, torch.float32, is_alone=True)
    assert set(found.backends.values()) == {"reference"}
    assert found.fallbacks()[-1:] == [
        "kernels: activation, scaled_causal_softmax: reference instead of compile: "
        "TritonMissing: Cannot find a working triton installation."
    ]
