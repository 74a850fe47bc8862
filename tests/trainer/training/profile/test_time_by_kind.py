"""The table of the time by kind: each moment of an iteration counts once."""

import pytest

from trainer.training.profile.kinds import kind_of
from trainer.training.profile.time_by_kind import Event, table_lines, time_by_kind

MAIN, BACKWARD, GLOO = 1, 2, 3


def mark(number, start, end):
    return Event(f"iteration {number}", start, end, MAIN, is_annotation=True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "products"),
        ("aten::linear", "products"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "products"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "products"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("gloo:all_reduce", "communication"),
        ("c10d::allreduce_", "communication"),
        ("llmctl::rope", "native kernels"),
        ("rms_norm_forward_kernel", "native kernels"),
        ("adamw_kernel", "optimizer"),
        ("aten::copy_", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("aten::add", "other"),
        ("aten::log_softmax", "other"),
    ],
)
def test_names_have_a_kind(name, kind):
    assert kind_of(name) == kind


def test_the_innermost_operation_counts_and_the_rest_is_python():
    events = [
        mark(1, 0.0, 100_000.0),
        Event("data", 0.0, 10_000.0, MAIN, is_annotation=True),
        Event("aten::to", 2_000.0, 8_000.0, MAIN),
        Event("aten::linear", 20_000.0, 50_000.0, MAIN),
        Event("aten::t", 20_000.0, 21_000.0, MAIN),
        Event("aten::copy_", 30_000.0, 35_000.0, MAIN),
        Event("optimizer", 60_000.0, 90_000.0, MAIN, is_annotation=True),
        Event("aten::mul", 60_000.0, 70_000.0, MAIN),
        Event("c10d::allreduce_", 70_000.0, 74_000.0, MAIN),
    ]
    times = time_by_kind(events)
    assert times.cpu == {
        "waiting for data": 10.0,
        "products": 25.0,
        "copies": 5.0,
        "optimizer": 26.0,
        "communication": 4.0,
        "Python": 30.0,
    }
    assert (times.gpu, times.beside_ms, times.iterations) == ({}, 0.0, 1)


def test_a_thread_or_a_collective_counts_where_the_main_thread_has_no_operation():
    events = [
        mark(4, 0.0, 10_000.0),
        mark(5, 20_000.0, 30_000.0),
        Event("aten::mm", 1_000.0, 3_000.0, MAIN),
        Event("aten::add", 2_000.0, 6_000.0, BACKWARD),
        Event("gloo:all_reduce", 2_000.0, 7_000.0, GLOO, is_async=True),
        Event("gloo:all_reduce", 4_000.0, 8_000.0, GLOO, is_async=True),
        # Between two iterations: an evaluation.
        Event("aten::mm", 11_000.0, 19_000.0, MAIN),
        Event("aten::mm", 29_000.0, 34_000.0, MAIN),
    ]
    assert time_by_kind(events).cpu == {"products": 1.5, "other": 1.5, "communication": 1.0, "Python": 6.0}


def test_messages_of_a_gpu_count_where_no_computation_runs():
    events = [
        mark(1, 0.0, 10_000.0),
        Event("aten::mm", 0.0, 1_000.0, MAIN),
        Event("sm90_xmma_gemm", 1_000.0, 5_000.0, None),
        Event("ncclDevKernel_AllReduce", 3_000.0, 7_000.0, None),
        Event("optimizer", 0.0, 10_000.0, None, is_annotation=True),
        Event("adamw_kernel", 8_000.0, 9_000.0, None),
    ]
    times = time_by_kind(events)
    assert times.gpu == {"products": 4.0, "communication": 2.0, "optimizer": 1.0, "idle": 3.0}
    assert times.beside_ms == 2.0
    lines = table_lines(times)
    assert lines[0].split() == ["CPU", "ms", "share", "GPU", "ms", "share"]
    assert "products                  1.00  10.0%        4.00  40.0%" in lines
    assert lines[-2].split() == ["whole", "step", "10.00", "100.0%", "10.00", "100.0%"]
    assert lines[-1] == "communication beside computation: 2.00 ms"


def test_without_an_iteration_there_is_nothing():
    times = time_by_kind([Event("aten::mm", 0.0, 1.0, MAIN)])
    assert times.iterations == 0
    assert sum(times.cpu.values()) == 0.0
    assert table_lines(times)[-1].split() == ["whole", "step", "0.00", "0.0%"]
