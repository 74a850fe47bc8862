"""Multi-token prediction equals a plain PyTorch model written from the equations of the paper."""

import itertools

import pytest
import torch

from tests.trainer.model.reference_case import (
    LENGTH,
    LLAMA,
    SLACK,
    VOCAB_SIZE,
    batch,
    distance,
    reference_weights,
    stirred,
)
from tests.trainer.model.reference_gpt import reference_further_losses, reference_loss
from trainer.data.samples.document_places import Documents
from trainer.data.samples.further_tokens import with_further_tokens
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.random_streams import StepRandomness
from trainer.pipeline.executor import forward_backward, forward_only
from trainer.planning.flops import count_parameters

DEPTHS = {**LLAMA, "mtp_num_layers": 2}
MODELS = {
    "llama": DEPTHS,
    "one-depth": {**DEPTHS, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
    # A tied table, scaled embeddings, capped logits, norms of another kind.
    "tied": {
        **DEPTHS,
        "untie_embeddings_and_output_weights": False,
        "embedding_scale": 3.0,
        "final_logit_softcapping": 3.0,
        "apply_layernorm_1p": True,
        "norm_placement": "sandwich",
    },
    "layer-norm-post": {"position_embedding_type": "none", "norm_placement": "post", "mtp_num_layers": 2},
    # The last layer has experts, and so have the prediction layers.
    "experts": {**DEPTHS, "num_experts": 4, "moe_layer_freq": [0, 1]},
}


def parts_of(whole, bounds):
    """Tokens, labels and mask of each document as samples of their own; without bounds the whole samples."""
    mask = torch.ones_like(whole.labels) if whole.loss_mask is None else whole.loss_mask
    tensors = (whole.tokens, whole.labels, mask)
    if bounds is None:
        return [tensors]
    rows = [(row, cut) for row, ends in enumerate(bounds) for cut in zip(ends, ends[1:], strict=False)]
    return [tuple(tensor[row : row + 1, start:stop] for tensor in tensors) for row, (start, stop) in rows]


def reference(built, model, batches, dtype, bounds=None):
    """The printed loss, the sum and the number of labels of each depth, and gradients of loss / 10."""
    weights = reference_weights(built, dtype)
    main, further, totals = 0.0, 0.0, torch.zeros(model.mtp_num_layers, 2)
    for whole in batches:
        parts = parts_of(whole, bounds)
        main = main + sum(reference_loss(weights, model, *part) for part in parts)
        depths = zip(*(reference_further_losses(weights, model, *part) for part in parts), strict=True)
        for depth, found in enumerate(depths):
            loss, count = (sum(numbers) for numbers in zip(*found, strict=True))
            further = further + whole.valid_tokens * loss / max(1, count)
            totals[depth] += torch.tensor([float(loss.detach()), float(count)])
    factor = model.mtp_loss_scaling_factor / model.mtp_num_layers
    ((main + factor * further) / 10).backward()
    return float(main.detach()), totals, {name: weight.grad.double() for name, weight in weights.items()}


def check(model, batches, bounds=None, **training):
    config, built = stirred(model, **training)
    loss = forward_backward(built, batches, valid_tokens=10, loss_scale=1.0, randomness=StepRandomness(1, 0))
    expected_loss, totals, expected = reference(built, config.model, batches, torch.float64, bounds)
    _, _, rounded = reference(built, config.model, batches, torch.float32, bounds)
    rounding = max(distance(rounded[name], right) for name, right in expected.items())
    for name, right in expected.items():
        assert right.any(), name
        assert distance(built.gradients.main_grad(name)[: len(right)], right) <= SLACK * rounding, name
    assert float(loss) == pytest.approx(expected_loss, rel=1e-6)  # the printed loss is that of the next token alone
    found = built.take_further_losses()
    assert list(found) == [f"mtp_{depth}_loss" for depth in range(1, len(totals) + 1)]
    assert [*itertools.chain(*found.values())] == pytest.approx(totals.flatten().tolist(), rel=1e-5)
    assert set(built.take_further_losses().values()) == {(0.0, 0.0)}


@pytest.mark.parametrize("masked", [False, True], ids=["all-tokens", "masked"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_losses_and_gradients_equal_the_equations(model, masked):
    check(model, [batch(0, masked), batch(1, masked)])


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_recompute_changes_nothing(method):
    check(DEPTHS, [batch(0, masked=True)], recompute_granularity="full", recompute_method=method)


def test_a_document_predicts_nothing_of_the_next():
    bounds = ((0, 5, LENGTH), (0, 2, 9, LENGTH), (0, LENGTH))
    documents = Documents(bounds)
    packed = batch(0, masked=True)
    packed = MicroBatch(packed.tokens, packed.labels, packed.loss_mask, documents=documents, restarts=documents)
    check({**DEPTHS, "mtp_num_layers": 1}, [packed], bounds)


def test_evaluation_computes_the_next_token_only():
    _, built = stirred(DEPTHS)
    with_depths = forward_only(built, [batch(0, masked=True)])
    _, plain = stirred({**DEPTHS, "mtp_num_layers": 0})
    for name, parameter in plain.parameters.items():
        parameter.data.copy_(built.parameters[name])
    assert float(with_depths) == float(forward_only(plain, [batch(0, masked=True)]))
    assert set(built.take_further_losses().values()) == {(0.0, 0.0)}


def test_parameters_are_those_counted():
    for model in MODELS.values():
        config, built = stirred({**model, "make_vocab_size_divisible_by": 1})
        assert count_parameters(config, VOCAB_SIZE).total == sum(weight.numel() for weight in built.parameters.values())


def test_more_depths_than_tokens_predict_nothing():
    one = batch(0, masked=True)
    short = MicroBatch(one.tokens[:, :2], one.labels[:, :2])
    depths = with_further_tokens(short, 3).further
    assert [int(depth.loss_mask.sum()) for depth in depths] == [3, 0, 0]
    assert all(depth.tokens.shape == (3, 2) for depth in depths)


def test_a_mask_of_bools_counts_as_numbers():
    one = batch(0, masked=True)
    bools = MicroBatch(one.tokens, one.labels, one.loss_mask.bool(), documents=Documents(((0, 5, LENGTH),) * 3))
    numbers = MicroBatch(one.tokens, one.labels, one.loss_mask, documents=bools.documents)
    for found, expected in zip(*(with_further_tokens(part, 2).further for part in (bools, numbers)), strict=True):
        assert torch.equal(found.loss_mask, expected.loss_mask.bool()) and found.weight == expected.weight
        assert found.loss_mask.any() and not found.loss_mask[:, 4].any()
