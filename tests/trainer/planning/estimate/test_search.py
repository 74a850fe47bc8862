"""Search of layouts: never beaten by a layout that the planner plans itself, and bounds that are bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.trainer.planning.estimate.published_layouts import PUBLISHED
from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config
from trainer.planning.checks import check_world_size
from trainer.planning.estimate.candidates import candidates
from trainer.planning.estimate.devices import DEVICES, GIB
from trainer.planning.estimate.layer_time import layer_time
from trainer.planning.estimate.links import Links
from trainer.planning.estimate.plan import RunPlan, changed, plan_run
from trainer.planning.estimate.search import search_layouts
from trainer.planning.estimate.speed import step_seconds
from trainer.planning.schedule.placement import ScheduleError

VOCABULARY = 32000
QUICK = ("nemo-llama2-7b", "nemo-llama3-70b", "narayanan-3.6b", "korthikanti-22b")


def small(**training: Any) -> TrainConfig:
    return build_config(
        {
            "model": {"num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "attention_dropout": 0.0},
            "training": {"train_iters": 1, "seq_length": 4096, "global_batch_size": 16, "bf16": True, **training},
            "optimizer": {"lr": 1e-4},
        }
    )


def experts(**parallel: Any) -> TrainConfig:
    model = {"num_layers": 2, "hidden_size": 1024, "num_attention_heads": 16, "num_experts": 8, "moe_router_topk": 2}
    # So many tokens that each expert's products have more rows than columns, also if a rank has all experts.
    training = {"train_iters": 1, "seq_length": 1024, "micro_batch_size": 16, "global_batch_size": 128, "bf16": True}
    return build_config({"model": model, "parallel": parallel, "training": training, "optimizer": {"lr": 1e-4}})


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.proof) for name in PUBLISHED]
)
def test_the_best_is_never_slower_than_a_published_layout(name: str) -> None:
    published = PUBLISHED[name]
    size = (published.vocabulary, DEVICES[published.device], published.devices // 8, 8)
    own = plan_run(published.config(), *size)
    found = search_layouts(published.config(), *size).found
    assert found and all(each.plan.fits for each in found)
    assert own.fits and found[0].plan.tokens_per_s >= 0.999 * own.tokens_per_s


def test_nothing_that_fits_is_faster() -> None:
    """Against a plan of every candidate, on devices that are so small that many do not fit."""
    config, device = small(), replace(DEVICES["A100-40GB"], memory=6 * GIB)
    plans = []
    for one in candidates(config, VOCABULARY, Links(2, device), 4):
        try:
            plan = plan_run(changed(config, one.values), VOCABULARY, device, 2, 2)
        except (ConfigError, ScheduleError):
            continue
        plans.append((one, plan))
    fitting = [(plan.step.total, one) for one, plan in plans if plan.fits]
    assert 20 < len(fitting) < len(plans)
    result = search_layouts(config, VOCABULARY, device, 2, 2)
    assert result.found[0].plan.step.total == pytest.approx(min(time for time, _ in fitting), rel=0.005)
    by_mesh = {one.mesh: [time for time, other in fitting if other.mesh == one.mesh] for _, one in fitting}
    assert [each.candidate.mesh for each in result.found] == sorted(by_mesh, key=lambda mesh: min(by_mesh[mesh]))[:10]
    for one, plan in plans:
        assert one.bytes <= plan.worst.total, one
        assert one.seconds <= plan.step.total * 1.001, one
    for each in result.found:
        assert each.faster is None or (each.faster.bytes > device.memory and each.faster.candidate != each.candidate)
        assert sum(each.plan.limits.values()) < 1


def test_all_layouts_have_one_batch_also_if_the_config_names_none() -> None:
    unset = small(global_batch_size=None, micro_batch_size=4)
    layouts = list(candidates(unset, VOCABULARY, Links(4, DEVICES["H100"]), 4))
    # One micro-batch for each of the four replicas that the config has on four devices.
    assert {one.values["training.global_batch_size"] for one in layouts} == {16}
    assert len({one.values["training.micro_batch_size"] for one in layouts}) > 1
    found = search_layouts(unset, VOCABULARY, DEVICES["H100"], 1, 4).found
    assert {each.plan.config.training.global_batch_size for each in found} == {16}
    named = candidates(small(), VOCABULARY, Links(4, DEVICES["H100"]), 4)
    assert not any("training.global_batch_size" in one.values for one in named)


def test_a_short_table_gives_the_time_of_a_long_one() -> None:
    links = Links(8, DEVICES["H100"])
    for name, most in (("nemo-llama2-70b", 0.005), ("nemo-llama2-13b", 0.005), ("korthikanti-175b", 0.005)):
        published = PUBLISHED[name]
        own = plan_run(published.config(), published.vocabulary, links.device, published.devices // 8, 8)
        short = step_seconds(published.config(), published.vocabulary, published.devices, links)
        assert short == pytest.approx(own.step.total, rel=most), name


def test_what_needs_least_is_named_if_nothing_fits() -> None:
    result = search_layouts(small(), VOCABULARY, replace(DEVICES["H100"], memory=GIB), 1, 4)
    assert not result.found and result.nearest is not None
    assert "optimizer in CPU memory" in str(result.nearest.candidate) or "ZeRO-3" in str(result.nearest.candidate)
    with pytest.raises(ConfigError, match="has no estimate"):
        search_layouts(
            changed(small(), {"model.mtp_num_layers": 1, "model.position_embedding_type": "rope"}),
            VOCABULARY,
            DEVICES["H100"],
            1,
            4,
        )


def test_only_experts_wait_for_the_busiest_rank() -> None:
    links = Links(8, DEVICES["H100"])
    alone, among = (layer_time(experts(expert_model_parallel_size=size), 0, links) for size in (1, 8))
    computing = [each.forward - each.messages / 2 for each in (alone, among)]
    # The experts take 1.2 times as long; with all products so, the layer would take 1.15 times as long.
    assert 1.06 * computing[0] < computing[1] < 1.14 * computing[0]


def test_whole_experts_send_each_token_once() -> None:
    links = Links(8, DEVICES["H100"])
    tp, parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"expert_model_parallel_size": 4}
    divided, whole = (
        layer_time(experts(**tp, **parallel, expert_tensor_parallel_size=size), 0, links) for size in (2, 1)
    )
    assert 0.45 * divided.messages < whole.messages < 0.75 * divided.messages
    assert whole.forward < divided.forward


def test_the_search_knows_whole_experts() -> None:
    found = [one for one in candidates(experts(), VOCABULARY, Links(8, DEVICES["H100"]), 8) if one.mesh.whole]
    assert {one.mesh.ep for one in found if one.mesh.tp == 8} == {2, 4, 8}
    assert all(one.values["parallel.expert_tensor_parallel_size"] == 1 for one in found)
    assert "whole experts" in str(found[0])
    built = changed(experts(), found[0].values)
    check_world_size(built, 8)


def plan_of(training: dict[str, Any], optimizer: dict[str, Any]) -> RunPlan:
    values = {f"training.{key}": value for key, value in training.items()}
    values |= {f"optimizer.{key}": value for key, value in optimizer.items()}
    return plan_run(changed(small(), values), VOCABULARY, DEVICES["H100"], 1, 1)


def test_what_saves_memory_takes_time() -> None:
    plain = plan_of({}, {})
    selective = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    some, every, offloaded = plan_of(selective, {}), plan_of(full, {}), plan_of({}, {"optimizer_cpu_offload": True})
    assert plain.step.total < some.step.total < every.step.total
    assert plain.worst.total > some.worst.total > every.worst.total
    assert offloaded.step.optimizer > 10 * plain.step.optimizer and offloaded.worst.total < plain.worst.total
