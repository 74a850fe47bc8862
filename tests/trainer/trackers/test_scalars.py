"""Names of scalars: Megatron-LM's where it has one, ours otherwise."""

import math

from trainer.process.metrics import tasks_row, validation_row
from trainer.trackers.scalars import BY_SAMPLES, NAMES, scalars_of


def test_numbers_have_the_names_of_megatron():
    row = {"iteration": 3, "attempt": 1, "time": 1.0, "lm_loss": 2.5, "grad_norm": 0.5, "iteration_time_s": 0.25}
    row |= {
        "consumed_samples": 24,
        "batch_size": 8,
        "mtp_2_loss": 1.5,
        "num_zeros_in_grad": 7,
        "tflops_per_device": 9.0,
    }
    assert scalars_of(row) == {
        "lm loss": 2.5,
        "grad-norm": 0.5,
        "iteration-time": 0.25,
        "samples vs steps": 24.0,
        "batch-size": 8.0,
        "mtp_2 loss": 1.5,
        "num-zeros": 7.0,
        "throughput": 9.0,
    }


def test_timers_and_layers_with_experts_have_the_names_of_megatron():
    layers = {"layers.5": {"load_balancing_loss": 1.0, "z_loss": 2.0, "load_entropy": 0.5}}
    row = {"timers_s": {"forward_backward": {"min": 0.5, "max": 1.0}}, "moe_layers": layers, "z_loss": 3.0}
    assert scalars_of(row) == {
        "timers_s/forward_backward/min": 0.5,
        "forward-backward-time": 1.0,
        "moe/load_balancing_loss_layer_5": 1.0,
        "moe/z_loss_layer_5": 2.0,
        "moe_layers/layers.5/load_entropy": 0.5,
        "z_loss": 3.0,
    }


def test_validation_and_tasks_have_names_too():
    found = scalars_of(validation_row(1, 3, 0.5, {"sop_loss": 0.25}))
    assert found == {"lm loss validation": 0.5, "lm loss validation ppl": math.exp(0.5), "sop loss validation": 0.25}
    assert scalars_of(tasks_row(1, 3, {"piqa": {"acc": 0.5, "bad": math.nan}})) == {"tasks/piqa/acc": 0.5}


def test_mappings_of_any_depth_become_groups_and_what_is_no_number_is_left_out():
    row = {"layer_grad_norms": {"1": 0.5, "embedding": None}, "a": {"b": {"c": 2}}, "missed_save": "full", "on": True}
    row |= {"valid_ppl": math.inf, "tokens_per_s": 10.0, "a_number_of_ours": 3}
    found = {"layer_grad_norms/1": 0.5, "a/b/c": 2.0, "tokens_per_s": 10.0, "a_number_of_ours": 3.0}
    assert scalars_of(row) == found


def test_names_are_different_and_only_known_names_are_drawn_over_samples():
    assert len(set(NAMES.values())) == len(NAMES)
    assert set(NAMES.values()) >= BY_SAMPLES
