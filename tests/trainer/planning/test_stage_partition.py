"""Division of layers over pipeline stages: complete, balanced by cost, or explicit, or refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config
from trainer.planning.pipeline import pipeline_placement
from trainer.planning.stage_costs import part_costs
from trainer.planning.stage_layout import parse_stage_layout
from trainer.planning.stage_partition import partition_layers


def config(layers: int, pp: int, model: dict[str, Any] | None = None, **parallel: Any) -> TrainConfig:
    shape = {"hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 1376, "swiglu": True}
    return build_config(
        {
            "model": {"num_layers": layers, **shape, **(model or {})},
            "training": {"train_iters": 1, "seq_length": 512},
            "optimizer": {"lr": 1e-3},
            "parallel": {"pipeline_model_parallel_size": pp, **parallel},
        }
    )


MTP = {"mtp_num_layers": 1, "position_embedding_type": "rope"}


def at_length(one: TrainConfig, length: int) -> TrainConfig:
    return one.model_copy(update={"training": one.training.model_copy(update={"seq_length": length})})


def counts(one: TrainConfig, vocab_size: int = 32000) -> list[int]:
    return [len(layers) for layers in partition_layers(one, vocab_size)]


def largest_costs(one: TrainConfig, layers: tuple[int, ...], vocab_size: int) -> tuple[float, float]:
    """Largest cost of a rank and of a virtual stage for these layer counts."""
    costs, placement = part_costs(one, vocab_size), pipeline_placement(one)
    stage_costs, start = [], 0
    for number, count in enumerate(layers):
        cost = sum(costs.layers[start : start + count])
        cost += costs.embedding if number == 0 else 0.0
        cost += costs.head if number == len(layers) - 1 else 0.0
        stage_costs.append(cost)
        start += count
    ranks = [0.0] * placement.pp
    for number, cost in enumerate(stage_costs):
        ranks[placement.place(number)[0]] += cost
    return max(ranks), max(stage_costs)


VIRTUAL = {"num_virtual_stages_per_pipeline_rank": 2}
LAYOUTS = [
    *((layers, pp, {}) for layers in (1, 2, 5, 8, 30) for pp in (1, 2, 3)),
    (2, 4, {}),
    (5, 2, VIRTUAL),
    (8, 3, VIRTUAL),
    (9, 4, VIRTUAL),
    (5, 2, {"pipeline_schedule": "zb-v"}),
    (13, 4, {"pipeline_schedule": "zb-v"}),
]


@pytest.mark.parametrize("vocab_size", [100, 32000, 256000])
@pytest.mark.parametrize(("layers", "pp", "parallel"), LAYOUTS)
def test_every_layer_is_on_one_stage(layers: int, pp: int, parallel: dict[str, Any], vocab_size: int) -> None:
    found = partition_layers(config(layers, pp, **parallel), vocab_size)
    assert [layer for stage in found for layer in stage] == list(range(layers))
    assert all(found[1:-1]), found


def divisions(layers: int, stages: int) -> Any:
    """All divisions of layers over stages; only the first and last may be empty."""
    for cuts in itertools.combinations_with_replacement(range(layers + 1), stages - 1):
        division = tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers)))
        if all(division[1:-1]):
            yield division


@pytest.mark.parametrize("vocab_size", [100, 8000, 32000, 256000])
@pytest.mark.parametrize(
    ("layers", "pp", "model", "parallel"),
    [
        (8, 2, {}, {}),
        (10, 4, {}, {}),
        (9, 2, {}, VIRTUAL),
        (10, 3, {}, VIRTUAL),
        (9, 2, {}, {"pipeline_schedule": "zb-v"}),
        (11, 3, {}, {"pipeline_schedule": "zb-v"}),
        # Layers of different costs: exact with one stage per rank.
        (11, 4, {"num_experts": 8, "moe_layer_freq": 3}, {}),
        (10, 3, {"num_experts": 8, "moe_layer_freq": 2, "moe_router_topk": 4}, {}),
    ],
)
def test_no_division_is_better(
    layers: int, pp: int, model: dict[str, Any], parallel: dict[str, Any], vocab_size: int
) -> None:
    one = config(layers, pp, model, **parallel)
    found = tuple(counts(one, vocab_size))
    stages = pipeline_placement(one).num_virtual_stages
    best = min(largest_costs(one, division, vocab_size) for division in divisions(layers, stages))
    rank, stage = largest_costs(one, found, vocab_size)
    assert rank == pytest.approx(best[0], rel=1e-9)
    if pipeline_placement(one).chunks > 1:
        costs = (largest_costs(one, division, vocab_size) for division in divisions(layers, stages))
        assert stage <= min(of_stage for of_rank, of_stage in costs if of_rank <= rank * (1 + 1e-9)) * (1 + 1e-9)


def test_unequal_layers_in_chunks_are_no_worse_than_equal_counts() -> None:
    one = config(24, 3, {"num_experts": 8, "moe_layer_freq": 4, "moe_router_topk": 8}, **VIRTUAL)
    assert largest_costs(one, tuple(counts(one, 100)), 100) <= largest_costs(one, (4,) * 6, 100)


@pytest.mark.parametrize(
    ("hidden", "heads", "ffn", "length", "vocab_size", "head", "embedding"),
    [
        # Medians of CPU time on one x86 core, in layers; see trainer.planning.stage_costs.
        (256, 4, 688, 256, 4096, 1.056, 0.007),
        (512, 8, 1376, 512, 32000, 3.98, 0.005),
        (512, 8, 1376, 256, 8192, 1.13, 0.005),
        (1024, 16, 2752, 512, 32000, 2.34, 0.002),
        (256, 8, 688, 2048, 4096, 0.579, 0.0024),
    ],
)
def test_costs_are_as_measured(
    hidden: int, heads: int, ffn: int, length: int, vocab_size: int, head: float, embedding: float
) -> None:
    shape = {"hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": ffn, "disable_bias_linear": True}
    costs = part_costs(at_length(config(1, 1, shape), length), vocab_size)
    assert costs.head / costs.layers[0] == pytest.approx(head, rel=0.1)
    assert costs.embedding / costs.layers[0] == pytest.approx(embedding, abs=0.002)


def test_the_slower_of_two_stages_is_as_fast_as_it_can_be() -> None:
    # Measured in CPU time per step, 8 layers of 512 with 32,000 words: 944 and 1000 ms like this, 1062 and 788 ms
    # with 7 and 1.
    assert counts(config(8, 2)) == [6, 2]
    small = {"hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 688}
    assert counts(at_length(config(4, 2, small), 256), 4096) == [3, 1]


def test_a_looked_up_table_costs_its_rows_and_not_its_size() -> None:
    one = config(8, 2)
    assert part_costs(one, 32000).embedding == part_costs(one, 10_000_000).embedding


def test_head_and_loss_add_to_the_cost_of_the_last_stage() -> None:
    assert counts(config(8, 2), 100) == [4, 4]
    first, last = counts(config(8, 2), 32000)
    assert first > last > 0  # the head of 32,000 x 512 costs four such layers
    assert counts(config(8, 2), 10_000_000) == [8, 0]
    # Both ends of a V are on the first rank, which then holds the fewest layers.
    down_first, down_last, up_last, up_first = counts(config(8, 2, pipeline_schedule="zb-v"))
    assert down_first + up_first < down_last + up_last


def test_layers_that_do_not_divide_are_all_kept() -> None:
    assert counts(config(30, 4), 100) == [7, 8, 8, 7]


def test_full_recompute_adds_to_the_cost_of_layers() -> None:
    one = config(8, 2)
    training = {"recompute_granularity": "full", "recompute_method": "uniform"}
    again = one.model_copy(update={"training": one.training.model_copy(update=training)})
    before, after = part_costs(one, 32000), part_costs(again, 32000)
    assert after.layers[0] == pytest.approx(before.layers[0] * 4 / 3)
    assert after.head == before.head


@pytest.mark.parametrize("model", [{}, {"num_experts": 8, "moe_layer_freq": 3}])
@pytest.mark.parametrize(("pp", "chunks"), [(64, 1), (16, 4), (8, 1)])
def test_large_models_are_divided_at_once(pp: int, chunks: int, model: dict[str, Any]) -> None:
    one = config(126, pp, model, num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None)
    found = counts(one, 128_256)
    assert len(found) == pp * chunks
    assert sum(found) == 126
    # An exhaustive search would not finish.


@pytest.mark.parametrize(
    ("layers", "pp", "parallel", "expected"),
    [
        (8, 4, {"decoder_first_pipeline_num_layers": 2}, [2, 2, 2, 2]),
        (8, 4, {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1}, [1, 3, 3, 1]),
        (8, 3, {"decoder_last_pipeline_num_layers": 0}, [4, 4, 0]),
        (8, 2, {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 5}, [3, 5]),
        (8, 2, {"num_layers_per_virtual_pipeline_stage": 2}, [2, 2, 2, 2]),
        (8, 2, {"pipeline_model_parallel_layout": "Et*3|t*5L"}, [3, 5]),
        (8, 2, {"pipeline_model_parallel_layout": "E|(tt|)*2,tttt L"}, [0, 2, 2, 4]),
        (8, 2, {"pipeline_model_parallel_layout": "Et*3|t|t*4|L", "pipeline_schedule": "zb-v"}, [3, 1, 4, 0]),
        (8, 1, {"pipeline_model_parallel_layout": "Et*8L"}, [8]),
    ],
)
def test_explicit_counts(layers: int, pp: int, parallel: dict[str, Any], expected: list[int]) -> None:
    assert counts(config(layers, pp, **parallel)) == expected


def test_explicit_counts_of_a_rank_are_shared_by_its_virtual_stages() -> None:
    found = counts(config(14, 2, decoder_first_pipeline_num_layers=6, **VIRTUAL), 100)
    assert (found[0] + found[2], found[1] + found[3]) == (6, 8)


LAYOUT = "parallel.pipeline_model_parallel_layout"
FIRST, LAST = "parallel.decoder_first_pipeline_num_layers", "parallel.decoder_last_pipeline_num_layers"
VIRTUAL_KEY = "parallel.num_virtual_stages_per_pipeline_rank"


@pytest.mark.parametrize(
    ("layers", "pp", "parallel", "key", "says"),
    [
        (8, 11, {}, "parallel.pipeline_model_parallel_size", "use at most 10, or 9 layers"),
        (3, 3, VIRTUAL, "parallel.pipeline_model_parallel_size", "use at most 2, or 4 layers"),
        (
            8,
            4,
            {"decoder_first_pipeline_num_layers": 3},
            FIRST,
            "leaves 5 of 8 layers, which do not divide evenly over 3",
        ),
        (8, 4, {"decoder_first_pipeline_num_layers": 3}, FIRST, "use 2 or 5"),
        (8, 2, {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 4}, FIRST, "use 4"),
        (8, 2, {"decoder_first_pipeline_num_layers": 9}, FIRST, "9 is more than the 8 layers of the model; use 6"),
        (8, 3, {"decoder_first_pipeline_num_layers": 8}, FIRST, "leaves 0 layers to each other pipeline rank"),
        (8, 3, {"decoder_first_pipeline_num_layers": 8}, FIRST, "rank, but some need 1; use 2 or 4 or 6"),
        (
            8,
            3,
            {"decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 6},
            FIRST,
            "5 together with decoder_last_pipeline_num_layers 6 is more than the 8 layers of the model; use 0 or 1",
        ),
        # No count for the first stage is valid.
        (
            8,
            3,
            {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 9},
            LAST,
            "9 together with decoder_first_pipeline_num_layers 2 is more than the 8 layers of the model; use 3 or 4",
        ),
        (
            8,
            3,
            {"decoder_first_pipeline_num_layers": 9, "decoder_last_pipeline_num_layers": 9},
            FIRST,
            "leave both out, and stages are balanced by cost",
        ),
        (2, 4, {"decoder_last_pipeline_num_layers": 1}, LAST, "leave it out, and stages are balanced by cost"),
        (
            8,
            2,
            {"decoder_first_pipeline_num_layers": 0, **VIRTUAL},
            FIRST,
            "0 leaves a virtual stage empty: decoder_first_pipeline_num_layers must be at least 1; use 1 or 2 or 3",
        ),
        (1, 2, {"num_virtual_stages_per_pipeline_rank": 8}, VIRTUAL_KEY, "8 on each of 2 ranks makes 16 virtual"),
        (1, 2, {"num_virtual_stages_per_pipeline_rank": 8}, VIRTUAL_KEY, "only 3 parts; use at most 1, or 14 layers"),
        (
            1,
            2,
            {"num_virtual_stages_per_pipeline_rank": 8, "pipeline_schedule": "interleaved"},
            VIRTUAL_KEY,
            "use 2 on a pipeline of at most 1, or 14 layers",
        ),
        (
            1,
            4,
            {"num_virtual_stages_per_pipeline_rank": 8},
            VIRTUAL_KEY,
            "use 1 on a pipeline of at most 3, or 30 layers",
        ),
        (2, 2, {"pipeline_model_parallel_layout": "Et|t||||L"}, LAYOUT, "only 4 parts; use at most 4, or 4 layers"),
        (
            1,
            4,
            {"pipeline_model_parallel_layout": "Et|||L"},
            LAYOUT,
            "use a pipeline of at most 3, or 2 layers",
        ),
        (8, 1, {"decoder_first_pipeline_num_layers": 8}, FIRST, "needs parallel.pipeline_model_parallel_size above 1"),
        (
            8,
            2,
            {"num_layers_per_virtual_pipeline_stage": 3},
            "parallel.num_layers_per_virtual_pipeline_stage",
            "does not divide model.num_layers 8; use one of 1, 2, 4",
        ),
        (
            30,
            4,
            {"num_layers_per_virtual_pipeline_stage": 3},
            "parallel.num_layers_per_virtual_pipeline_stage",
            "use 28 or 32 layers",
        ),
        (8, 2, {"pipeline_model_parallel_layout": "Et*3|t*4L"}, LAYOUT, "holds 7 layers, but model.num_layers is 8"),
        (8, 2, {"pipeline_model_parallel_layout": "Et*3|t|t*4L"}, LAYOUT, "has 3 virtual stages"),
        (8, 2, {"pipeline_model_parallel_layout": "Et*4||t*4|L"}, LAYOUT, "virtual stage 1 of 'Et*4||t*4|L' is empty"),
        (
            8,
            2,
            {"pipeline_model_parallel_layout": "Et*4|t*4L", "pipeline_schedule": "zb-v"},
            LAYOUT,
            "requires 4 with pipeline_schedule zb-v",
        ),
        (
            8,
            2,
            {"pipeline_model_parallel_layout": "Et*4|t*4L", **VIRTUAL},
            LAYOUT,
            "num_virtual_stages_per_pipeline_rank",
        ),
    ],
)
def test_refused(layers: int, pp: int, parallel: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(layers, pp, **parallel)
    assert caught.value.key == key
    assert says in caught.value.problem


def test_prediction_layers_lie_and_cost_on_the_last_stage() -> None:
    layout = {"pipeline_model_parallel_layout": "Et*4|t*3mL"}
    assert counts(config(7, 2, MTP, **layout)) == [4, 3]
    for model in ({}, {**MTP, "mtp_num_layers": 2}):
        with pytest.raises(ConfigError, match="has 1 layers of multi-token prediction") as caught:
            config(7, 2, model, **layout)
        assert caught.value.key == LAYOUT
    one, plain = config(16, 2, MTP), config(16, 2, {"position_embedding_type": "rope"})
    assert counts(one)[1] < counts(plain)[1] < 8
    further = part_costs(one, 32000).head - 2 * part_costs(plain, 32000).head
    assert further > part_costs(plain, 32000).layers[-1]  # a layer and the projection


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Et*3|(tt|)*29|L", [3, *[2] * 29, 0, 0]),
        ("Et*3|(tt|)*29L", [3, *[2] * 29, 0]),
        ("E t, t | ttL", [2, 2]),
        ("E((t|t)*2|)*2tL", [1, 2, 1, 1, 2, 1, 1]),
        ("EL", [0]),
        ("E|*3L", [0, 0, 0, 0]),
        ("Et|ttmmL", [1, 2]),
        ("Ett|mL", [2, 0]),
    ],
)
def test_notation(text: str, expected: list[int]) -> None:
    assert [len(stage) for stage in parse_stage_layout(text)] == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Et|m|L", "multi-token prediction"),
        ("Et|mtL", "multi-token prediction"),
        ("tt|tL", "only the first of the 2 stages begins with E"),
        ("Ett|t", "only the last ends with L"),
        ("EttL|tL", "virtual stage 0 is 'EttL'"),
        ("tEt|L", "virtual stage 0 is 'tEt'"),
        ("Ex|L", "'x' means nothing"),
        ("E*|L", "'*' means nothing"),
        ("*3E|L", "'*3' repeats nothing"),
        ("E(t|L", "not closed"),
        ("Et)|L", "')' closes nothing"),
        ("E((t*9999)*9999)*9999L", "makes more than"),
        ("", "virtual stage 0 is ''"),
    ],
)
def test_notation_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_stage_layout(text)
    assert caught.value.key == LAYOUT
    assert says in caught.value.problem
    assert "\n" not in caught.value.problem
