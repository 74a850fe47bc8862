"""Masters as remainders of bfloat16 weights: the steps are those of float32 masters, on one rank and on several."""

from functools import partial

import pytest
import torch

from tests.trainer.optimizer.test_distributed_optimizer import (
    ADAM,
    GPT2,
    LLAMA,
    assert_same,
    configure,
    start,
    step,
    train,
)
from tests.trainer.optimizer.test_optimizer import build, set_gradients
from trainer.optimizer.layer_sums import LayerSums
from trainer.optimizer.split_master import SplitMaster, joined

BF16 = {"bf16": True}
KEPT = {"store_param_remainders": True}
LOW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def ties(master):
    return (master.view(torch.int32) & 0xFFFF) == 0x8000


@pytest.mark.parametrize("low", [{}, LOW], ids=["fp32 moments", "bf16 moments"])
def test_steps_on_the_same_gradients_have_the_same_masters(low):
    """Also where masters are ties: only the weights differ there, by one number of bfloat16."""
    plain, plain_optimizer = build(low, BF16)
    kept, optimizer = build({**low, **KEPT}, BF16)
    assert all(isinstance(master, SplitMaster) for master in optimizer.masters.values())
    for seed in range(20):
        for model, own in ((plain, plain_optimizer), (kept, optimizer)):
            set_gradients(model, seed)
            assert not own.step(0.01).skipped
    for kind, named in plain_optimizer.tensors().items():
        for name, tensor in named.items():
            assert torch.equal(joined(optimizer.tensors()[kind][name]), tensor), (kind, name)
    for name, master in plain_optimizer.masters.items():
        one, other = plain.parameters[name].view(-1), kept.parameters[name].view(-1)
        assert torch.equal(one[~ties(master)], other[~ties(master)])
        assert ((one.view(torch.int16) - other.view(torch.int16)).abs() <= 1).all()
    assert torch.equal(LayerSums(plain).squares(plain_optimizer.masters), LayerSums(kept).squares(optimizer.masters))


def test_a_load_of_weights_alone_makes_them_the_masters():
    model, optimizer = build(KEPT, BF16)
    set_gradients(model, 1)
    optimizer.step(0.01)
    name, weight = next(iter(model.parameters.items()))
    assert not torch.equal(joined(optimizer.masters[name]), weight.detach().float().view(-1))
    optimizer.adopt_weights()
    for name, weight in model.parameters.items():
        assert torch.equal(joined(optimizer.masters[name]), weight.detach().float().view(-1))


def masters_after(rank, world_size, config):
    """Masters of this rank's shards after each of three iterations, and the number of ties among them."""
    model, optimizer = start(config, rank, world_size)
    found = []
    for iteration in range(3):
        step(config, model, optimizer, iteration)
        model.gradients.wait_for_weights()
        masters = {name: joined(master).clone() for name, master in optimizer.masters.items()}
        tied = sum(int(ties(master).sum()) for master in masters.values())
        found.append(({name: master.numpy() for name, master in masters.items()}, tied))
    return found


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(1, {}), (2, {"use_distributed_optimizer": True}), (2, {"tensor_model_parallel_size": 2})],
    ids=str,
)
def test_masters_of_training_have_the_same_bits(ranks, world_size, parallel):
    model = {**LLAMA, "make_vocab_size_divisible_by": 2}
    plain, kept = (
        ranks.run(masters_after, configure(model, {**ADAM, **keys}, BF16, **parallel), world_size=world_size)
        for keys in ({}, KEPT)
    )
    for of_ranks in zip(zip(*plain, strict=True), zip(*kept, strict=True), strict=True):
        for (expected, _), (found, _) in zip(*of_ranks, strict=True):
            assert found.keys() == expected.keys()
            assert all((found[name] == master).all() for name, master in expected.items())
        # Where a weight is a tie on any rank, gradients differ from then on. Processors differ in where there is one.
        if any(tied for _, tied in of_ranks[0]):
            break


def test_bits_of_sharded_training_are_those_of_unsharded_training(ranks):
    made = {}

    def unsharded(config, world_size):
        key = config.model_dump_json()
        made[key] = made.get(key) or ranks.run(train, config, world_size=world_size)
        return made[key]

    assert_same(ranks, unsharded, 4, partial(configure, GPT2, {**ADAM, **KEPT, **LOW}, BF16))
