"""Random streams depend only on their address, on every platform and in every process."""

import torch

from trainer.distributed.random_streams import StepRandomness, seeded_generator, stream_seed


def test_seeds_are_pinned():
    # Seeds of existing runs: a change here changes every initial weight and every dropout mask.
    assert stream_seed("initial", 1234, "layers.0.attention.qkv.weight") == 7629218473208941853
    assert stream_seed("dropout", 1, 2, 3, 4, "attention", 5) == 628425029714973054


def test_different_addresses_do_not_collide():
    addresses = [("a", 1, 12), ("a", 11, 2), ("a1", 1, 2), ("a", 1, 1, 2), ("a", 112)]
    assert len({stream_seed(*address) for address in addresses}) == len(addresses)


def test_every_part_of_the_address_matters_and_nothing_else():
    device = torch.device("cpu")

    def first(seed=1, iteration=2, micro_batch=3, site="attention", layer=4, part=5):
        randomness = StepRandomness(seed, iteration).micro_batch(micro_batch)
        return float(torch.rand((), generator=randomness.dropout_generator(device, site, layer, part)))

    torch.manual_seed(1)
    here = first()
    torch.manual_seed(2)
    assert first() == here
    others = [first(seed=0), first(iteration=0), first(micro_batch=0), first(site="embedding"), first(layer=0)]
    assert len({here, *others, first(part=0)}) == 7


def test_generators_start_afresh():
    draws = [torch.rand(3, generator=seeded_generator("cpu", "x")) for _ in range(2)]
    assert torch.equal(*draws)
