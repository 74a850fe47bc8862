"""Backend selection: request, availability, self-test and agreement of ranks."""

import json
import os
import platform
from dataclasses import replace

import pytest
import torch

from tests.trainer.spawn import Ranks
from tests.trainer.training.pretraining_job import Job
from trainer.config.errors import ConfigError
from trainer.ops.adamw import ADAMW
from trainer.ops.dispatch import selection as choice_module
from trainer.ops.dispatch.registry import OPERATIONS, Kernels
from trainer.ops.dispatch.selection import (
    Availability,
    KernelSelection,
    choose_kernels,
    slow_processor,
    with_cpu_memory,
)
from trainer.ops.dispatch.self_test import self_test
from trainer.ops.dispatch.setup import serial_kernels
from trainer.ops.operation import Implementation, Operation
from trainer.ops.rms_norm import RMS_NORM
from trainer.planning.build_config import build_config
from trainer.planning.command_line import build_train_config, parse_command_line
from trainer.planning.kernel_choice import ROWS, RequestedBackend, requested_backends, requested_in_cpu_memory

CPU = torch.device("cpu")
ALL_THERE = Availability({}, {"native": "x86-64-v4"})
NO_COMPILER = Availability({"native": "no C++ compiler was found"}, {})
AUTO = RequestedBackend("auto", "training.kernel_backend", False)
CONFIG = {
    "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "normalization": "RMSNorm"},
    "training": {"train_iters": 4, "seq_length": 16},
    "optimizer": {"lr": 0.01},
    "data": {"mock_data": True},
}


def configured(**training):
    return build_config({**CONFIG, "training": {**CONFIG["training"], **training}})


def chosen(requested, availability=ALL_THERE, dtype=torch.float32):
    return choose_kernels(requested, availability, CPU, dtype, is_alone=True)


def test_every_operation_of_the_table_is_there():
    assert [operation.name for operation in OPERATIONS] == list(ROWS)
    for operation in OPERATIONS:
        assert {"reference", operation.default} <= operation.implementations.keys()
        assert Kernels()[operation] is operation.implementations[operation.default].function
    with pytest.raises(ValueError, match="'rmsnorm'"):
        Kernels(rmsnorm=reference)


@pytest.mark.usefixtures("kernel_library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_comes_first_if_available(dtype):
    found = chosen({"rms_norm": AUTO}, dtype=dtype)
    assert found.backends == {"rms_norm": "native"}
    assert found.lines() == [f"kernels: native ({ALL_THERE.described['native']}) for rms_norm"]
    assert found.labels == {"rms_norm": f"native ({ALL_THERE.described['native']})"}
    assert found.kernels[RMS_NORM] is RMS_NORM.implementations["native"].function


def test_auto_falls_back_with_one_line_that_names_operation_backend_and_reason():
    found = chosen({"rms_norm": AUTO, "add_rms_norm": AUTO}, NO_COMPILER)
    assert set(found.backends.values()) == {"reference"}
    names = ", ".join(found.backends)
    assert found.lines() == [
        f"kernels: reference for {names}",
        f"kernels: {names}: reference instead of native: no C++ compiler was found",
    ]
    assert all(found.kernels[operation] is Kernels()[operation] for operation in OPERATIONS)


def test_on_a_gpu_without_a_compiler_torch_comes_next(monkeypatch):
    """Torch where it has a function of its own, and the reference where it has none or fails."""
    monkeypatch.setattr(choice_module, "self_test", lambda operation, *_: "fails" if operation is ADAMW else None)
    requested = {"rms_norm": AUTO, "rope": AUTO, "adamw": AUTO}
    found = choose_kernels(requested, NO_COMPILER, torch.device("cuda", 0), torch.float32, is_alone=True)
    assert found.backends == {"rms_norm": "torch", "rope": "reference", "adamw": "reference"}
    assert found.fallbacks()[-1] == "kernels: adamw: reference instead of torch: fails"


def test_a_reason_for_all_operations_is_one_line():
    found = chosen({"rms_norm": AUTO, "adamw": AUTO}, NO_COMPILER)
    assert found.backends == {"rms_norm": "reference", "adamw": "torch"}
    assert found.fallbacks() == [
        "kernels: rms_norm, adamw: reference or torch instead of native: no C++ compiler was found"
    ]


def test_a_missing_backend_requested_by_name_is_an_error_with_a_remedy():
    named = RequestedBackend("native", "training.kernel_backends.rms_norm", True)
    with pytest.raises(
        ConfigError, match=r"kernel_backends.rms_norm: rms_norm cannot run on native: no C\+\+ compiler"
    ):
        chosen({"rms_norm": named}, NO_COMPILER)
    with pytest.raises(ConfigError, match="training.kernel_backend: rms_norm cannot run on native: .*set it to auto"):
        chosen({"rms_norm": replace(AUTO, backend="native")}, NO_COMPILER)
    with pytest.raises(ConfigError, match="cannot run on torch: no implementation on cpu; use native or reference"):
        chosen({"rms_norm": replace(named, backend="torch")})
    # For all ops a backend is that of those that have it.
    assert chosen({"rms_norm": replace(AUTO, backend="torch")}).backends == {"rms_norm": "reference"}


def test_self_tests_compare_lists_that_are_changed_in_place():
    def change(values, factor):
        for value in values:
            value.mul_(factor)

    def forget_the_last(values, factor):
        change(values[:-1], factor)

    def example(device, dtype, _):
        return [torch.ones(3, device=device, dtype=dtype), torch.ones(2, device=device, dtype=dtype)], 3.0

    backends = {
        "native": Implementation(forget_the_last),
        "torch": Implementation(change),
        "reference": Implementation(change),
    }
    operation = Operation("change", backends, [example])
    assert self_test(operation, "torch", CPU, torch.float32) is None
    assert "result 1 is off" in (self_test(operation, "native", CPU, torch.float32) or "")


def test_self_tests_detect_errors_in_rows_of_many_channels():
    def forget_the_last(hidden, weight, epsilon):
        normed = RMS_NORM.implementations["reference"].function(hidden, weight, epsilon)
        return normed if hidden.shape[-1] < 1024 else normed.index_fill(-1, torch.tensor([8199]), 0.0)

    operation = replace(
        RMS_NORM, implementations={**RMS_NORM.implementations, "native": Implementation(forget_the_last)}
    )
    found = self_test(operation, "native", CPU, torch.float32) or ""
    assert found.startswith("its self-test failed: result 0 is off") and found.endswith("in example 2")


def wrong(hidden, weight, epsilon):
    return RMS_NORM.implementations["reference"].function(hidden, weight, epsilon) * 1.01


def raising(*_):
    raise RuntimeError("no kernel image is available\nfor execution on the device")


@pytest.mark.parametrize(
    ("function", "said"),
    [(wrong, "its self-test failed: result 0 is off by"), (raising, "RuntimeError: no kernel image is available")],
)
def test_a_backend_that_fails_its_self_test_is_not_used(monkeypatch, function, said):
    broken = replace(RMS_NORM, implementations={**RMS_NORM.implementations, "native": Implementation(function)})
    monkeypatch.setattr(choice_module, "OPERATIONS", (broken,))
    found = chosen({"rms_norm": AUTO})
    assert found.backends == {"rms_norm": "reference"}
    (line,) = found.lines()[1:]
    assert line.startswith(f"kernels: rms_norm: reference instead of native: {said}") and "\n" not in line


def test_a_kernel_that_breaks_the_device_ends_the_process(monkeypatch):
    """Later communication of the ranks would fail without naming the kernel."""

    def broken(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def example(_, dtype, generator):
        return torch.randn((3, 8), generator=generator, dtype=dtype), torch.ones(8, dtype=dtype), 1e-5

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    operation = replace(RMS_NORM, examples=[example])
    with pytest.raises(
        RuntimeError, match=r"rms_norm on native has broken cuda.*illegal.*kernel_backends.rms_norm to re"
    ):
        self_test(operation, "native", torch.device("cuda"), torch.float32)


def test_a_dtype_that_a_kernel_does_not_support(monkeypatch):
    limited = Implementation(raising, dtypes=(torch.float32,))
    operation = replace(RMS_NORM, implementations={**RMS_NORM.implementations, "native": limited})
    monkeypatch.setattr(choice_module, "OPERATIONS", (operation,))
    assert chosen({"rms_norm": AUTO}, dtype=torch.bfloat16).lines() == ["kernels: reference for rms_norm"]
    with pytest.raises(ConfigError, match="bfloat16 is not supported; use reference"):
        chosen(
            {"rms_norm": RequestedBackend("native", "training.kernel_backends.rms_norm", True)}, dtype=torch.bfloat16
        )


def test_old_processors_use_torch():
    assert slow_processor("x86-64-v3") is None
    assert ("AVX2" in (slow_processor("portable") or "")) == (platform.machine() == "x86_64")


def choose_on_rank(rank, world_size, missing_on, backend):
    del world_size
    availability = NO_COMPILER if rank == missing_on else Availability({}, {})
    right = replace(RMS_NORM, implementations={name: Implementation(reference) for name in ("native", "reference")})
    choice_module.OPERATIONS = (right,)
    try:
        found = choose_kernels(
            {"rms_norm": replace(AUTO, backend=backend)}, availability, CPU, torch.float32, is_alone=False
        )
    except ConfigError as error:
        return str(error)
    return found.backends["rms_norm"], found.lines()[1:]


def reference(*arguments):
    return RMS_NORM.implementations["reference"].function(*arguments)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


def test_ranks_agree_on_a_backend_that_all_have(ranks):
    assert ranks.run(choose_on_rank, None, "auto") == [("native", [])] * 2
    lost = "kernels: rms_norm: reference instead of native: no C++ compiler was found"
    assert ranks.run(choose_on_rank, 0, "auto") == [("reference", [lost])] * 2
    assert ranks.run(choose_on_rank, 1, "auto") == [("reference", [f"{lost} (on rank 1)"])] * 2


def test_a_backend_missing_on_one_rank_is_an_error_on_all(ranks):
    first, second = ranks.run(choose_on_rank, 1, "native")
    assert first == second
    assert "rms_norm cannot run on native: no C++ compiler was found (on rank 1); or set it to auto" in first


def choose_for_both_memories(rank, world_size):
    del rank, world_size
    choice_module.OPERATIONS = OPERATIONS  # another test may have changed it in this process
    on_gpu = KernelSelection(Kernels(), {"adamw": "reference"}, {}, {})
    availability = Availability({}, {}, in_cpu_memory=NO_COMPILER)
    both = with_cpu_memory(on_gpu, {"adamw": AUTO}, availability, CPU)
    return both.kernels[ADAMW].__name__, both.kernels.in_cpu_memory[ADAMW].__name__, both.lines(), both.labels


def test_backends_in_cpu_memory_are_chosen_for_the_cpu(ranks):
    expected = [
        "kernels: reference for adamw",
        "kernels in CPU memory: torch for adamw",
        "kernels in CPU memory: adamw: torch instead of native: no C++ compiler was found",
    ]
    labels = {"adamw": "reference", "adamw in CPU memory": "torch"}
    assert ranks.run(choose_for_both_memories) == [("_reference", "_torch", expected, labels)] * 2


@pytest.mark.parametrize(
    ("training", "there"),
    [
        ({"kernel_backends": {"adamw": "native"}}, ("native", True)),
        ({"kernel_backends": {"adamw": "reference"}}, ("reference", True)),
        ({"kernel_backend": "torch"}, ("torch", False)),
        # The config requests nothing of the host's processor.
        ({"kernel_backend": "native"}, ("auto", False)),
    ],
)
def test_requested_in_cpu_memory(training, there):
    optimizer = {**CONFIG["optimizer"], "optimizer_cpu_offload": True}
    values = {**CONFIG, "training": {**CONFIG["training"], **training}, "optimizer": optimizer}
    found = requested_in_cpu_memory(build_config(values))
    assert {name: (one.backend, one.is_named) for name, one in found.items()} == {"adamw": there}
    assert requested_in_cpu_memory(configured(**training)) == {}


def test_requested_by_the_config():
    requested = requested_backends(configured(kernel_backend="native", kernel_backends={"rms_norm": "reference"}))
    assert requested["rms_norm"] == RequestedBackend("reference", "training.kernel_backends.rms_norm", True)
    assert requested["cross_entropy"] == RequestedBackend("native", "training.kernel_backend", False)
    assert "layer_norm" not in requested and "moe_permute" not in requested and "scaled_causal_softmax" not in requested


def test_a_norm_of_the_embedding_is_a_layer_norm_beside_others():
    model = {**CONFIG["model"], "embedding_layer_norm": True}
    assert {"layer_norm", "rms_norm"} <= requested_backends(build_config({**CONFIG, "model": model})).keys()


@pytest.mark.parametrize(
    ("arguments", "operations"),
    [
        (["--no-masked-softmax-fusion", "--attention-backend", "unfused"], "scaled_causal_softmax"),
        (["--no-bias-gelu-fusion"], "activation"),
        (["--no-bias-swiglu-fusion", "--swiglu"], "activation"),
        (["--no-bias-dropout-fusion"], "bias_dropout_add"),
        (["--no-rope-fusion", "--position-embedding-type", "rope"], "rope"),
        (["--cross-entropy-loss-fusion", "false"], "cross_entropy"),
        (["--moe-permute-fusion", "false", "--num-experts", "4"], "moe_permute moe_unpermute"),
    ],
)
def test_megatrons_flags_turn_operations_off(arguments, operations):
    base = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"]
    base += ["--train-iters", "4", "--lr", "0.01", "--mock-data"]
    requested = requested_backends(build_train_config(parse_command_line([*base, *arguments])))
    assert {name for name, found in requested.items() if found.backend == "reference"} == set(operations.split())
    assert all(found.is_named for found in requested.values() if found.backend == "reference")


def test_a_switch_of_the_other_activation_turns_nothing_off():
    assert requested_backends(configured(no_bias_swiglu_fusion=True))["activation"].backend == "auto"
    assert requested_backends(configured(cross_entropy_loss_fusion=True))["cross_entropy"].backend == "auto"


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"kernel_backends": {"rmsnorm": "native"}}, "'rmsnorm' is not an op; did you mean rms_norm?"),
        ({"kernel_backends": {"xyz": "native"}}, "the ops are rms_norm, add_rms_norm,"),
        ({"kernel_backend": "apex"}, "training.kernel_backend: 'apex' is not valid"),
        ({"kernel_backends": {"rope": "apex"}}, "training.kernel_backends.rope: 'apex' is not valid"),
        (
            {"kernel_backend": "compile"},
            "training.kernel_backend: 'compile' is not valid: this backend was removed; use auto, native, torch or ref",
        ),
        (
            {"kernel_backends": {"rope": "triton"}},
            "training.kernel_backends.rope: 'triton' is not valid: this backend ",
        ),
        (
            {"kernel_backend": "nvrtc"},
            "'nvrtc' is not valid: NVRTC builds the GPU code of native where there is no nvcc",
        ),
        (
            {"kernel_backends": {"cross_entropy": "native"}, "cross_entropy_loss_fusion": False},
            "turns cross_entropy off, but training.kernel_backends requests native",
        ),
    ],
)
def test_config_errors(training, said):
    with pytest.raises(ConfigError) as caught:
        configured(**training)
    assert said in str(caught.value)


def test_backends_by_flag():
    line = parse_command_line(["--kernel-backend", "reference", "--kernel-backends", "rope=native", "rms_norm=torch"])
    assert line.values["training.kernel_backend"] == "reference"
    assert line.values["training.kernel_backends"] == {"rope": "native", "rms_norm": "torch"}


def test_zero_bubble_schedules_need_the_product_that_accumulates():
    parallel = {"no_gradient_accumulation_fusion": True, "pipeline_model_parallel_size": 2}
    build_config({**CONFIG, "parallel": parallel})
    with pytest.raises(ConfigError, match="no_gradient_accumulation_fusion: .*zb-h1"):
        build_config({**CONFIG, "parallel": {**parallel, "pipeline_schedule": "zb-h1"}})


@pytest.mark.usefixtures("kernel_library")
def test_one_process_uses_existing_builds_and_never_builds(tmp_path):
    from trainer.ops.build.build_settings import BuildSettings

    named = configured(kernel_backend="torch")
    found = serial_kernels(named, BuildSettings.from_variables(os.environ), CPU, torch.float32)
    assert found.backends["rms_norm"] == "native"
    off = serial_kernels(configured(kernel_backend="reference"), BuildSettings(tmp_path), CPU, torch.float32)
    assert set(off.backends.values()) == {"reference"} and len(off.lines()) == 1
    assert list(tmp_path.iterdir()) == []


def losses_of(run, **training):
    run.mkdir()
    values = {**CONFIG, "training": {**CONFIG["training"], **training}}
    (run / "config.yaml").write_text(json.dumps(values))
    with Job(run, 2) as job:
        assert job.ends((0, 1)) == [0, 0], (run / "attempts/1/rank-00000.log").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    said = (run / "attempts/1/rank-00000.log").read_text()
    return [row["lm_loss"] for row in rows if "lm_loss" in row], [x for x in said.splitlines() if "kernels:" in x]


def test_two_ranks_train_alike_with_and_without_kernels(tmp_path):
    with_kernels, said = losses_of(tmp_path / "auto")
    without, nothing = losses_of(tmp_path / "reference", kernel_backend="reference")
    assert len(without) == 4 and with_kernels == pytest.approx(without, rel=1e-5)
    assert any(line.startswith("kernels: native (") and "rms_norm" in line for line in said)
    assert [line.split(" for ")[0] for line in nothing] == ["kernels: reference"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_passes_the_self_test_of_every_operation_that_it_has(dtype):
    there = [operation for operation in OPERATIONS if "torch" in operation.implementations]
    assert "adamw" in {operation.name for operation in there}
    for operation in there:
        assert self_test(operation, "torch", torch.device("cpu"), dtype) is None
