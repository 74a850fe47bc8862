"""Multi-token prediction equals a plain PyTorch model written from the equations of the paper."""

import pytest
import torch

from tests.trainer.model.reference_gpt import reference_further_losses, reference_loss
from trainer.data.samples.document_places import Documents
from trainer.data.samples.further_tokens import with_further_tokens
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.distributed.random_streams import StepRandomness
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward, forward_only
from trainer.planning.build_config import build_config
from trainer.planning.flops import count_parameters

VOCAB_SIZE, LENGTH = 61, 12
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "mtp_num_layers": 2,
}
MODELS = {
    "llama": LLAMA,
    "one-depth": {**LLAMA, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
    # A tied table, scaled embeddings, capped logits, norms of another kind.
    "tied": {
        **LLAMA,
        "untie_embeddings_and_output_weights": False,
        "embedding_scale": 3.0,
        "final_logit_softcapping": 3.0,
        "apply_layernorm_1p": True,
        "norm_placement": "sandwich",
    },
    "layer-norm-post": {"position_embedding_type": "none", "norm_placement": "post", "mtp_num_layers": 2},
    # The last layer has experts, and so have the prediction layers.
    "experts": {**LLAMA, "num_experts": 4, "moe_layer_freq": [0, 1]},
}
SLACK = 4  # As in test_model.py: the trainer may round that much worse than the reference in float32.


def build(model, **training):
    config = build_config(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "make_vocab_size_divisible_by": 16,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "init_method_std": 0.2,
                **model,
            },
            "training": {"train_iters": 1, "seq_length": LENGTH, "micro_batch_size": 3, **training},
            "optimizer": {"lr": 1e-3},
        }
    )
    built = build_model(config, VOCAB_SIZE, ParallelMesh.build(config, 0, 1), ProcessGroups(), torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in built.parameters.values():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.2
    return config, built


def batch(index, masked=True):
    generator = torch.Generator().manual_seed(index)
    window = torch.randint(0, VOCAB_SIZE, (3, LENGTH + 1), generator=generator)
    mask = (torch.rand(3, LENGTH, generator=generator) < 0.5).float() if masked else None
    return MicroBatch(window[:, :-1].contiguous(), window[:, 1:].contiguous(), mask, index)


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
    weights = {
        name: parameter.detach().to(dtype)[: built.layouts[name].valid_rows].requires_grad_()
        for name, parameter in built.parameters.items()
    }
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


def distance(found, right):
    return float((found.double() - right).norm() / right.norm())


def check(model, batches, bounds=None, **training):
    config, built = build(model, **training)
    loss = forward_backward(built, batches, valid_tokens=10, loss_scale=1.0, randomness=StepRandomness(1, 0))
    expected_loss, totals, expected = reference(built, config.model, batches, torch.float64, bounds)
    _, _, rounded = reference(built, config.model, batches, torch.float32, bounds)
    rounding = max(distance(rounded[name], right) for name, right in expected.items())
    for name, right in expected.items():
        assert right.any(), name
        assert distance(built.gradients.main_grad(name)[: len(right)], right) <= SLACK * rounding, name
    assert float(loss) == pytest.approx(expected_loss, rel=1e-6)  # the printed loss is that of the next token alone
    assert built.take_further_losses() == pytest.approx(totals.flatten().tolist(), rel=1e-5)
    assert not any(built.take_further_losses())


@pytest.mark.parametrize("masked", [False, True], ids=["all-tokens", "masked"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_losses_and_gradients_equal_the_equations(model, masked):
    check(model, [batch(0, masked), batch(1, masked)])


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_recompute_changes_nothing(method):
    check(LLAMA, [batch(0)], recompute_granularity="full", recompute_method=method)


def test_a_document_predicts_nothing_of_the_next():
    bounds = ((0, 5, LENGTH), (0, 2, 9, LENGTH), (0, LENGTH))
    documents = Documents(bounds)
    packed = batch(0)
    packed = MicroBatch(packed.tokens, packed.labels, packed.loss_mask, documents=documents, restarts=documents)
    check({**LLAMA, "mtp_num_layers": 1}, [packed], bounds)


def test_evaluation_computes_the_next_token_only():
    _, built = build(LLAMA)
    with_depths = forward_only(built, [batch(0)])
    _, plain = build({**LLAMA, "mtp_num_layers": 0})
    for name, parameter in plain.parameters.items():
        parameter.data.copy_(built.parameters[name])
    assert float(with_depths) == float(forward_only(plain, [batch(0)]))
    assert not any(built.take_further_losses())


def test_parameters_are_those_counted():
    for model in MODELS.values():
        config, built = build({**model, "make_vocab_size_divisible_by": 1})
        assert count_parameters(config, VOCAB_SIZE).total == sum(weight.numel() for weight in built.parameters.values())


def test_more_depths_than_tokens_predict_nothing():
    one = batch(0)
    short = MicroBatch(one.tokens[:, :2], one.labels[:, :2])
    depths = with_further_tokens(short, 3).further
    assert [int(depth.loss_mask.sum()) for depth in depths] == [3, 0, 0]
    assert all(depth.tokens.shape == (3, 2) for depth in depths)


def test_a_mask_of_bools_counts_as_numbers():
    one = batch(0)
    bools = MicroBatch(one.tokens, one.labels, one.loss_mask.bool(), documents=Documents(((0, 5, LENGTH),) * 3))
    numbers = MicroBatch(one.tokens, one.labels, one.loss_mask, documents=bools.documents)
    for found, expected in zip(*(with_further_tokens(part, 2).further for part in (bools, numbers)), strict=True):
        assert torch.equal(found.loss_mask, expected.loss_mask.bool()) and found.weight == expected.weight
        assert found.loss_mask.any() and not found.loss_mask[:, 4].any()
