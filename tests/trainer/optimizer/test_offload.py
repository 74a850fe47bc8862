"""Optimizer state in CPU memory gives the same numbers and the same state."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.ops.adamw import ADAMW
from trainer.ops.dispatch.registry import Kernels
from trainer.optimizer import cpu_offload
from trainer.optimizer.cpu_offload import offloaded_shards
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.planning.build_config import build_config

SGD = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.1}
ADAM = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1}
LOW = {**ADAM, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(cpu_offload, "_CHUNK", 1024)


def build(optimizer, offload=None, training=None, device="cpu", kernels=None):
    keys = {} if offload is None else {"optimizer_cpu_offload": True, "optimizer_offload_fraction": offload}
    config = build_config(
        {
            "model": {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 2, "make_vocab_size_divisible_by": 1},
            "training": {"train_iters": 10, "seq_length": 9, "device": device, **(training or {})},
            "optimizer": {**optimizer, **keys},
        }
    )
    mesh = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
    model = build_model(config, 41, mesh, ProcessGroups(), torch.device(device), kernels)
    return model, MixedPrecisionOptimizer(config, model)


def take_step(model, optimizer, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    for shard in model.gradients.parameter_shards:
        shard.gradient.copy_(factor * torch.randn(shard.gradient.shape, generator=generator))
    return optimizer.step(0.01)


def train(model, optimizer, seeds=range(4)):
    return [take_step(model, optimizer, seed).grad_norm for seed in seeds]


def assert_equal(one, other):
    (model, optimizer), (other_model, other_optimizer) = one, other
    for name, parameter in model.parameters.items():
        assert torch.equal(parameter, other_model.parameters[name]), name
    assert optimizer.tensors().keys() == other_optimizer.tensors().keys()
    for kind, named in optimizer.tensors().items():
        assert list(named) == list(other_optimizer.tensors()[kind])
        for name, tensor in named.items():
            assert torch.equal(tensor.cpu(), other_optimizer.tensors()[kind][name].cpu()), (kind, name)


@pytest.mark.parametrize("training", [{}, {"bf16": True}, {"fp16": True, "loss_scale": 64.0}], ids=str)
@pytest.mark.parametrize("optimizer", [SGD, ADAM, LOW], ids=["sgd", "adam", "bf16 moments"])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_numbers_are_those_without_offloading(fraction, optimizer, training):
    plain, offloaded = build(optimizer, None, training), build(optimizer, fraction, training)
    assert train(*plain) == train(*offloaded)
    assert_equal(plain, offloaded)


def test_offloaded_state_is_stepped_by_the_kernel_for_cpus():
    calls = []

    def counted(place):
        def step(*arguments):
            calls.append(place)
            Kernels()[ADAMW](*arguments)

        return step

    kernels = Kernels(Kernels(adamw=counted("CPU memory")), adamw=counted("GPU"))
    train(*build(ADAM, 0.5, kernels=kernels), seeds=[0])
    assert set(calls) == {"CPU memory", "GPU"}
    calls.clear()
    train(*build(ADAM, 1.0, kernels=kernels), seeds=[0])
    assert set(calls) == {"CPU memory"}


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_optimizer_takes_the_kernel_of_the_moment(fraction):
    calls = []

    def counted(name):
        def step(*arguments):
            calls.append(name)
            Kernels()[ADAMW](*arguments)

        return Kernels(adamw=step)

    kernels = counted("first")
    model, optimizer = build(ADAM, fraction, kernels=kernels)
    train(model, optimizer, seeds=[0])
    assert set(calls) == {"first"}
    calls.clear()
    kernels.switch_to(counted("second"))
    train(model, optimizer, seeds=[0])
    assert set(calls) == {"second"}


@pytest.mark.parametrize(
    ("training", "written"), [({}, set()), ({"bf16": True}, {torch.bfloat16})], ids=["fp32", "bf16"]
)
def test_the_kernel_writes_16_bit_weights_in_its_own_pass(training, written):
    dtypes, tensors = set(), []

    def step(masters, grads, exp_avgs, exp_avg_sqs, copies, constants):
        assert len(copies) in (0, len(masters))
        dtypes.update(copy.dtype for copy in copies)
        tensors.extend(copies)
        Kernels()[ADAMW](masters, grads, exp_avgs, exp_avg_sqs, copies, constants)

    model, optimizer = build(ADAM, 1.0, training, kernels=Kernels(Kernels(adamw=step)))
    train(model, optimizer, seeds=[0])
    assert dtypes == written
    weights = sum(shard.weight.numel() for shard in model.gradients.parameter_shards)
    assert sum(copy.numel() for copy in tensors) == (weights if written else 0)


class Bus:
    """Streams and events of a simulated device on the CPU.

    Queued work runs when the caller waits for it.
    """

    def __init__(self):
        self.log = []

    def stream(self, _):
        return nullcontext()

    def event(self):
        return SimpleNamespace(
            record=lambda _: self.log.append("record"), synchronize=lambda: self.log.append("synchronize")
        )


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("training", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_copies_give_the_same_numbers_and_no_buffer_is_written_before_it_is_free(training, optimizer, monkeypatch):
    bus = Bus()
    monkeypatch.setattr(cpu_offload, "_is_on_gpu", bool)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "stream", bus.stream)
    monkeypatch.setattr(torch.cuda, "Event", bus.event)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options | {"pin_memory": False}))
    stepped = cpu_offload._Chunk.step

    def step(chunk, *arguments):
        # The chunk's gradients have arrived, and the previous contents of its targets have been sent.
        assert bus.log[-2:] == ["synchronize"] * 2
        stepped(chunk, *arguments)

    monkeypatch.setattr(cpu_offload._Chunk, "step", step)
    plain, offloaded = build(optimizer, None, training), build(optimizer, 1.0, training)
    assert train(*plain) == train(*offloaded)
    assert_equal(plain, offloaded)
    assert len(bus.log) > 8  # in several chunks


def test_a_bad_gradient_leaves_everything_as_it_was():
    plain, offloaded = build(ADAM), build(ADAM, 1.0)
    assert take_step(*offloaded, 0, factor=float("inf")).skipped
    assert_equal(plain, offloaded)


@pytest.mark.parametrize("training", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("before", "after"), [(None, 1.0), (1.0, None), (0.4, 0.7)])
def test_a_run_continues_with_more_or_less_offloaded(before, after, training):
    one, other = build(ADAM, before, training), build(ADAM, after, training)
    train(*one)
    for name, parameter in one[0].parameters.items():
        other[0].parameters[name].data.copy_(parameter)
    for kind, named in one[1].tensors().items():
        for name, tensor in named.items():
            other[1].tensors()[kind][name].copy_(tensor)
    other[1].restore(one[1].steps, None)
    assert_equal(one, other)
    assert train(*one, range(4, 7)) == train(*other, range(4, 7))
    assert_equal(one, other)


@pytest.mark.parametrize("training", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_masters_follow_weights_that_were_loaded_alone(training):
    plain, offloaded = build(ADAM, None, training), build(ADAM, 1.0, training)
    for model, optimizer in (plain, offloaded):
        for parameter in model.parameters.values():
            parameter.data.add_(0.5)
        optimizer.adopt_weights()
        train(model, optimizer)
    assert_equal(plain, offloaded)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_about_the_requested_fraction_is_offloaded(fraction):
    model, _ = build(ADAM)
    parameter_shards = model.gradients.parameter_shards
    total = sum(shard.weight.numel() for shard in parameter_shards)
    chosen = sum(shard.weight.numel() for shard in offloaded_shards(parameter_shards, fraction))
    assert abs(chosen - fraction * total) <= max(shard.weight.numel() for shard in parameter_shards) / 2
    assert fraction not in (0.0, 1.0) or chosen == fraction * total


@pytest.mark.gpu
@pytest.mark.parametrize("training", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_gradients_and_weights_are_copied_between_gpu_and_cpu(fraction, training):
    plain, offloaded = build(ADAM, None, training, "cuda"), build(ADAM, fraction, training, "cuda")
    train(*plain), train(*offloaded)
    assert any(not tensor.is_cuda for tensor in offloaded[1].tensors()["exp_avg"].values())
    # In bf16 a master with different last bits may round to the next weight: one in 2^8.
    limits = {"rtol": 2.0**-7, "atol": 1e-5} if training else {"rtol": 1e-5, "atol": 1e-5}
    for name, parameter in plain[0].parameters.items():
        torch.testing.assert_close(offloaded[0].parameters[name], parameter, **limits)
    for kind, named in plain[1].tensors().items():
        for name, tensor in named.items():
            found = offloaded[1].tensors()[kind][name]
            torch.testing.assert_close(found.cpu(), tensor.cpu(), rtol=1e-5, atol=1e-5)
