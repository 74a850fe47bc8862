"""Rates of their own for the vocabulary tables, and by the width of the model, in shards and in every layout."""

import pytest

from tests.trainer.optimizer.test_distributed_optimizer import ADAM, EXPERTS, GPT2, LLAMA, configure, train

DECOUPLED = {**ADAM, "decoupled_lr": 1e-3}


BY_WIDTH = {"mup_base_hidden_size": 6}


@pytest.mark.parametrize("model", [GPT2, LLAMA, {**EXPERTS, **BY_WIDTH}], ids=["tied", "untied", "by-width"])
def test_shards_have_the_bits_of_whole_state(ranks, model):
    plain, sharded = (
        ranks.run(train, configure(model, DECOUPLED, {"bf16": True}, **parallel), world_size=2)
        for parallel in ({}, {"use_distributed_optimizer": True})
    )
    for one, other in zip(plain, sharded, strict=True):
        assert one[0] == other[0]
        for name in one[2]:
            assert (one[2][name] == other[2][name]).all(), name


def test_every_layout_trains_alike(ranks):
    def norms(optimizer, world_size, model=GPT2, **parallel):
        return ranks.run(train, configure(model, optimizer, **parallel), world_size=world_size)[0][1]

    plain = norms(ADAM, 1)
    for optimizer, model in ((DECOUPLED, GPT2), (ADAM, {**GPT2, **BY_WIDTH})):
        alone = norms(optimizer, 1, model)
        for layout in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}):
            assert norms(optimizer, 2, model, **layout) == pytest.approx(alone, rel=1e-4)
        assert plain[1:] != pytest.approx(alone[1:], rel=1e-2)
