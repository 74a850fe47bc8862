"""The run summary before the first step."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.train_config import TrainConfig
from trainer.distributed.mesh import ParallelMesh
from trainer.planning.build_config import build_config
from trainer.training.run_summary import summarize_run


def lines(world_size: int, **sections: dict[str, Any]) -> list[str]:
    values: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0},
        "training": {"train_iters": 10, "seq_length": 64, "global_batch_size": 16},
        "optimizer": {"lr": 1e-3},
    }
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    config: TrainConfig = build_config(values)
    return summarize_run(config, ParallelMesh.build(config, 0, world_size), 100, "CPU")


def test_a_plain_run_needs_one_line() -> None:
    (line,) = lines(2)
    assert line == "210,560 parameters, fp32, TP 1 x PP 1 x DP 2 on 2 x CPU, 16 sequences of 64 tokens per iteration"


def test_every_axis_that_is_used_is_named() -> None:
    parallel = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 3,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "pipeline_schedule": "zb-h1",
        "use_distributed_optimizer": True,
    }
    training = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1, "bf16": True}
    first, second = lines(24, parallel=parallel, model={"num_experts": 4}, training=training)
    assert "per token), bf16, TP 2 with sequence parallelism x PP 3 x CP 2 (p2p) x DP 2, EP 4 on 24 x CPU" in first
    assert second == (
        "pipeline zb-h1, 3 stages of layers 1, 2, 1, 8 micro-batches; "
        "ZeRO-1: optimizer state divided over 4 ranks; full recompute of 1 layers per stage"
    )


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"parallel": {"pipeline_model_parallel_size": 2}},
            "pipeline 1f1b, 2 stages of 2 layers each, 16 micro-batches",
        ),
        (
            {"parallel": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}},
            "pipeline interleaved, 4 virtual stages of 1 layers each, 16 micro-batches",
        ),
        (
            {"training": {"recompute_granularity": "selective"}},
            "nothing to recompute in core_attn, which keeps no scores",
        ),
        (
            {"training": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}},
            "recompute of mlp; nothing to recompute in core_attn, which keeps no scores",
        ),
        (
            {
                "model": {"attention_dropout": 0.1, "attention_backend": "unfused"},
                "training": {"recompute_granularity": "selective"},
            },
            "attention_backend unfused with attention_dropout keeps the attention scores; auto keeps none; "
            "recompute of core_attn",
        ),
        (
            {
                "parallel": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
                "training": {"recompute_granularity": "full", "recompute_method": "block"},
            },
            "pipeline interleaved, 4 virtual stages of 1 layers each, 16 micro-batches; "
            "full recompute of 1 layers per virtual stage",
        ),
        (
            {"training": {"recompute_granularity": "full", "recompute_method": "uniform"}},
            "full recompute of layers in groups of 1",
        ),
        (
            {"model": {"attention_dropout": 0.1, "attention_backend": "local"}},
            "attention_backend local with attention_dropout keeps the attention scores; auto keeps none",
        ),
        (
            {"model": {"attention_dropout": 0.1}, "training": {"recompute_granularity": "selective"}},
            "nothing to recompute in core_attn, which keeps no scores",
        ),
        ({"optimizer": {"optimizer_cpu_offload": True}}, "100% of the optimizer state in CPU memory"),
    ],
)
def test_the_second_line(sections: dict[str, dict[str, Any]], said: str) -> None:
    world_size = sections.get("parallel", {}).get("pipeline_model_parallel_size", 1)
    assert lines(world_size, **sections)[1:] == [said]
