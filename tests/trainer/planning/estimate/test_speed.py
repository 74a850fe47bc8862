"""Time of a step, term by term: each test has the physics that a wrong term would break."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config
from trainer.planning.estimate.devices import DEVICES
from trainer.planning.estimate.layer_time import layer_time
from trainer.planning.estimate.links import Links
from trainer.planning.estimate.parameters import RankParameters
from trainer.planning.estimate.plan import RunPlan, plan_run
from trainer.planning.estimate.speed import Hidden, exposed_seconds

H100 = DEVICES["H100"]
VOCABULARY = 32000
NOTHING = Hidden(0.0, 0.0)
PARAMETERS = 1_000_000_000
LLAMA_8B = {
    **{"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32},
    **{"swiglu": True, "attention_dropout": 0.0, "hidden_dropout": 0.0},
}


def config(model: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None, **training: Any) -> TrainConfig:
    values = {"train_iters": 1, "seq_length": 4096, "global_batch_size": 512, "bf16": True, **training}
    sections = {"model": {**LLAMA_8B, **(model or {})}, "parallel": parallel or {}, "training": values}
    return build_config({**sections, "optimizer": {"lr": 1e-4}})


def exposed(nodes: int, micro_batches: int = 1, hidden: Hidden = NOTHING, **parallel: Any) -> float:
    own = config(parallel=parallel)
    return exposed_seconds(own, RankParameters(PARAMETERS, 0, 0), hidden, micro_batches, 8 * nodes, Links(8, H100))


def plan(
    nodes: int,
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    per_node: int = 8,
    **training: Any,
) -> RunPlan:
    return plan_run(config(model, parallel, **training), VOCABULARY, H100, nodes, per_node)


def test_a_ring_uses_the_adapters_of_all_its_ranks() -> None:
    links = Links(8, H100)
    spread, whole = links.group((8, 8)), links.group((64, 1))
    assert (spread.near, spread.nodes, whole.near, whole.nodes) == (1, 8, 8, 8)
    # Eight adapters of 50 GB/s are nearly as fast as NVLink; one is not.
    assert links.collective(1e9, spread) == pytest.approx(8 * links.collective(1e9, whole), rel=0.05)
    assert links.collective(1e9, whole) == pytest.approx(1.125 * links.collective(1e9, links.group((8, 1))), rel=0.05)


@pytest.mark.parametrize(
    ("axes", "near", "nodes"), [(((4, 1),), 4, 1), (((2, 4), (16, 32)), 2, 16), (((16, 1),), 8, 2), (((4, 4),), 2, 2)]
)
def test_a_group_knows_its_ranks_on_a_node(axes: tuple[tuple[int, int], ...], near: int, nodes: int) -> None:
    group = Links(8, H100).group(*axes)
    assert (group.near, group.nodes) == (near, nodes)


def test_an_all_to_all_leaves_a_node_through_the_own_adapter() -> None:
    links = Links(8, H100)
    within, between = links.exchange(1e9, links.group((8, 1))), links.exchange(1e9, links.group((16, 1)))
    # Eight of fifteen parts leave the node at 50 instead of 450 GB/s.
    assert between == pytest.approx(within * 8 / 15 * 9, rel=0.05)


def test_latency_grows_with_the_ranks() -> None:
    links = Links(8, H100)
    times = [links.collective(1.0, links.group((ranks, 1))) for ranks in (8, 64, 1024, 16384)]
    assert times == sorted(times) and times[-1] > 100 * times[0]
    # A tree needs a step for each doubling.
    assert links.all_reduce(1.0, links.group((16384, 1))) < 0.1 * times[-1]


def test_weights_are_gathered_twice_and_gradients_summed_once_for_each_micro_batch() -> None:
    sharded = {
        stage: {"data_parallel_sharding_strategy": name}
        for stage, name in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params"))
    }
    one, four = ([exposed(2, count, **sharded[stage]) for stage in range(4)] for count in (1, 4))
    sent = 15 / 16 * PARAMETERS / (400e9 * 0.85)
    # Bytes per parameter: gradients of 4, in an all-reduce twice; weights of 2. Some more for the messages' latency.
    assert one == pytest.approx([8 * sent, 6 * sent, 6 * sent, 8 * sent], rel=0.2)
    assert four == pytest.approx([8 * sent, 6 * sent, 18 * sent, 32 * sent], rel=0.2)


def test_messages_hide_behind_what_is_computed_meanwhile() -> None:
    sharded = {"data_parallel_sharding_strategy": "optim"}
    slow = Hidden(10.0, 20.0)
    everything = exposed(2, **sharded)
    hidden = exposed(2, hidden=slow, **sharded)
    assert hidden < 0.3 * everything
    late = exposed(2, hidden=slow, overlap_param_gather=False, **sharded)
    # The gather is a third of the bytes.
    assert late - hidden == pytest.approx(everything / 3, rel=0.25)
    assert exposed(2, hidden=slow, overlap_param_gather=False, overlap_grad_reduce=False, **sharded) == pytest.approx(
        everything
    )


def test_virtual_stages_hide_more_messages() -> None:
    sharded = {"data_parallel_sharding_strategy": "optim", "pipeline_model_parallel_size": 4}
    interleaved = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 4}
    short = Hidden(1e-3, 2e-3)
    assert exposed(8, hidden=short, **sharded, **interleaved) < 0.6 * exposed(8, hidden=short, **sharded)


def test_8b_loses_little_from_one_node_to_many() -> None:
    sharded = {"data_parallel_sharding_strategy": "optim"}
    speeds = [plan(nodes, parallel=sharded, global_batch_size=16 * nodes).tokens_per_s for nodes in (1, 8, 64)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[2] > 0.9 * speeds[0]


def test_small_layers_wait_for_the_host() -> None:
    tiny = {"num_layers": 24, "hidden_size": 1024, "ffn_hidden_size": 2816, "num_attention_heads": 16}
    small, large = (
        plan(1, tiny, per_node=1, seq_length=1024, global_batch_size=size, micro_batch_size=size) for size in (1, 32)
    )
    assert small.limits["host"] > 0.4 and large.limits["host"] == 0
    assert small.step.times.step_time == pytest.approx(3 * 24 * H100.host, rel=0.1)


def seconds_of_layer(device: str = "H100", model: dict[str, Any] | None = None, **training: Any) -> float:
    time = layer_time(config(model, **training), 0, Links(8, DEVICES[device]))
    return time.forward + time.backward


def test_attention_takes_the_time_of_its_kernel() -> None:
    long = {"seq_length": 32768, "global_batch_size": 1}
    torch, flash, unfused = (
        seconds_of_layer(model={"attention_backend": kernel}, **long) for kernel in ("auto", "flash", "unfused")
    )
    assert torch < flash < unfused
    same = [seconds_of_layer("A100-80GB", {"attention_backend": kernel}, **long) for kernel in ("auto", "flash")]
    assert same[0] == same[1]
    drops = {"attention_backend": "unfused", "attention_dropout": 0.1}
    assert seconds_of_layer(model=drops, **long) > 1.1 * unfused


def test_heads_that_no_tensor_core_takes_are_slow() -> None:
    """BLOOM's models: 1.34 times as long a step with 128 heads of 108 channels as with 64 of 216."""
    shape = {"hidden_size": 13824, "ffn_hidden_size": 55296, "swiglu": False, "attention_backend": "unfused"}
    aligned, odd = (
        seconds_of_layer("A100-80GB", {**shape, "num_attention_heads": heads}, seq_length=2048) for heads in (64, 128)
    )
    assert 1.15 < odd / aligned < 1.5
    fused = {**shape, "attention_backend": "auto"}
    ratio = seconds_of_layer("A100-80GB", {**fused, "num_attention_heads": 128}, seq_length=2048) / seconds_of_layer(
        "A100-80GB", {**fused, "num_attention_heads": 64}, seq_length=2048
    )
    assert ratio < 1.05


def test_small_products_reach_less() -> None:
    def rate(hidden: int) -> float:
        shape = {"hidden_size": hidden, "ffn_hidden_size": 4 * hidden, "num_attention_heads": 8, "swiglu": False}
        return hidden**2 / seconds_of_layer(model=shape, seq_length=512, micro_batch_size=64)

    rates = [rate(hidden) for hidden in (512, 1024, 4096, 8192)]
    assert rates == sorted(rates) and rates[2] > 1.5 * rates[0] and rates[3] < 1.3 * rates[2]


def test_gradients_that_products_do_not_add_cost_a_pass() -> None:
    alone = config(parallel={"no_gradient_accumulation_fusion": True})
    links = Links(8, H100)
    more = layer_time(alone, 0, links).backward - layer_time(config(), 0, links).backward
    parameters = 4 * 4096**2 + 3 * 4096 * 14336
    assert more == pytest.approx(10 * parameters / (3350e9 * 0.8), rel=0.01)


def test_a_ring_of_keys_hides_behind_attention_that_is_long_enough() -> None:
    def messages(length: int, between: float) -> float:
        own = config(parallel={"context_parallel_size": 2}, seq_length=length, global_batch_size=1)
        return layer_time(own, 0, Links(1, replace(H100, between=between))).messages

    assert messages(131072, 50e9) == 0.0
    assert messages(2048, 1e9) > 0.0


def test_a_loss_without_a_fused_kernel_passes_the_logits_more_often() -> None:
    plain, fused = (plan(1, kernel_backends=own) for own in ({"cross_entropy": "reference"}, {}))
    tokens = 4096 * 512 / 8
    more = plain.step.times.step_time - fused.step.times.step_time
    assert more == pytest.approx(tokens * 32 * VOCABULARY / (3350e9 * 0.8), rel=0.01)


def test_the_step_in_cpu_memory_is_as_slow_as_its_slower_part() -> None:
    states = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    own = build_config(
        {
            "model": LLAMA_8B,
            "training": {"train_iters": 1, "seq_length": 4096, "global_batch_size": 8, "bf16": True},
            "optimizer": {"lr": 1e-4, **states},
        }
    )
    found = plan_run(own, VOCABULARY, H100, 1, 8)
    parameters = found.step.optimizer * 20e9 / 6
    assert 7e9 < parameters < 9e9
