"""Documents that share a sample train as if each were alone.

Compares loss and every gradient, on any layout.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from tests.trainer.data.token_files import write
from tests.trainer.parity.layout_parity import disturb_vectors
from trainer.config.train_config import TrainConfig
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.samples.batches import Packing
from trainer.data.samples.micro_batch import MicroBatch
from trainer.data.samples.sources import Source
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.evaluation.perplexity import evaluate_text
from trainer.generation.model import GenerationModel
from trainer.parallel_model import ParallelModel, build_model
from trainer.pipeline.executor import forward_backward, forward_only
from trainer.planning.build_config import build_config

RANKS = 2

VOCAB_SIZE, EOD, LENGTH = 61, 7, 32
MODELS = {
    "gpt2": {},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "num_query_groups": 2,
        "rotary_percent": 0.5,
    },
}
LAYOUTS = {
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "cp2-a2a": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def config(model: str, parallel: dict[str, object] | None = None) -> TrainConfig:
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "make_vocab_size_divisible_by": 16}
    dropout = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "init_method_std": 0.2}
    return build_config(
        {
            "model": {**shape, **dropout, **MODELS[model]},
            "parallel": parallel or {},
            "training": {"train_iters": 1, "seq_length": LENGTH, "micro_batch_size": 2, "device": "cpu"},
            "optimizer": {"lr": 1e-3},
        }
    )


def packed() -> MicroBatch:
    """Two samples with documents of different lengths, one of a single token."""
    window = torch.randint(8, VOCAB_SIZE, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    for sample, place in ((0, 10), (0, 24), (1, 0), (1, 15), (1, 31)):
        window[sample, place] = EOD
    batch = MicroBatch(window[:, :-1].contiguous(), window[:, 1:].contiguous())
    return Packing(EOD, separate_attention=True, restart_positions=True).apply(batch)


def alone() -> list[MicroBatch]:
    """The same documents, each a micro-batch of one sample of its own length."""
    whole = packed()
    assert whole.documents is not None
    return [
        MicroBatch(whole.tokens[row : row + 1, start:stop], whole.labels[row : row + 1, start:stop])
        for row, bounds in enumerate(whole.documents.bounds)
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]


def build(model: str, mesh: ParallelMesh, groups: ProcessGroups, parallel: dict[str, object]) -> ParallelModel:
    built = build_model(config(model, parallel), VOCAB_SIZE, mesh, groups, torch.device("cpu"))
    disturb_vectors(built)
    return built


def trained(model: ParallelModel, batches: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    loss = forward_backward(model, batches, valid_tokens=2 * LENGTH, loss_scale=1.0, randomness=StepRandomness(1, 0))
    return float(loss), {name: model.gradients.main_grad(name).clone() for name in model.parameters}


@pytest.mark.parametrize("model", MODELS)
def test_packed_documents_sum_to_the_documents_alone(model: str) -> None:
    serial = build(model, ParallelMesh(tp=1, pp=1, dp=1, rank=0), ProcessGroups(), {})
    assert len(alone()) == 6
    loss, gradients = trained(serial, alone())
    packed_loss, packed_gradients = trained(serial, [packed()])
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        difference = (packed_gradients[name] - gradient).abs().max()
        assert float(difference) <= 2e-6 * float(gradient.abs().max()), name
    # Evaluation uses the same documents.
    assert float(forward_only(serial, [packed()])) == pytest.approx(loss, rel=1e-6)


def test_without_the_rules_the_documents_would_meet() -> None:
    serial = build("gpt2", ParallelMesh(tp=1, pp=1, dp=1, rank=0), ProcessGroups(), {})
    expected, _ = trained(serial, [packed()])
    whole = packed()
    for rules in ({"separate_attention": True}, {"restart_positions": True}):
        half = Packing(EOD, **rules).apply(MicroBatch(whole.tokens, whole.labels))
        assert abs(trained(serial, [half])[0] - expected) > 1e-2, rules


@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_packed_documents_are_the_same_bits_each_time(model: str) -> None:
    serial = build(model, ParallelMesh(tp=1, pp=1, dp=1, rank=0), ProcessGroups(), {})
    first, again = (trained(serial, [packed()])[1] for _ in range(2))
    assert all(torch.equal(gradient, again[name]) for name, gradient in first.items())


def worst_part(rank: int, world_size: int, model: str, parallel: dict[str, object]) -> tuple[float, float]:
    """This rank's loss, and the deviation of its gradients from the serial ones."""
    serial = build(model, ParallelMesh(tp=1, pp=1, dp=1, rank=0), ProcessGroups(), {})
    _, expected = trained(serial, [packed()])
    mesh = ParallelMesh.build(config(model, parallel), rank, world_size)
    divided = build(model, mesh, build_process_groups(mesh, timedelta(seconds=60)), parallel)
    loss, found = trained(divided, [packed()])
    deviations = []
    for name, gradient in found.items():
        layout = divided.layouts[name]
        # A table's padding depends on tp, and has no gradient on any layout.
        whole = expected[name].new_zeros(layout.global_shape)
        rows = min(len(whole), len(expected[name]))
        whole[:rows] = expected[name][:rows]
        deviations.append(float((gradient - layout.shard(whole, mesh)).abs().max() / whole.abs().max()))
    return loss, max(deviations)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_layouts_find_the_same_documents(ranks, model: str, layout: str) -> None:
    serial = build(model, ParallelMesh(tp=1, pp=1, dp=1, rank=0), ProcessGroups(), {})
    expected, _ = trained(serial, [packed()])
    reports = ranks.run(worst_part, model, LAYOUTS[layout])
    losses = [loss for loss, _ in reports]
    total = losses[0] if "tensor_model_parallel_size" in LAYOUTS[layout] else sum(losses)
    assert total == pytest.approx(expected, rel=1e-6)
    assert max(deviation for _, deviation in reports) < 1e-5


def test_evaluation_of_a_checkpoint_keeps_documents_apart(tmp_path) -> None:
    whole = packed()
    text = [*whole.tokens.flatten().tolist(), int(whole.labels[-1, -1])]
    write(tmp_path / "d", [text], VOCAB_SIZE)
    tokens = IndexedDataset(tmp_path / "d")
    model = build("llama", ParallelMesh(tp=1, pp=1, dp=1, rank=0), ProcessGroups(), {})
    serial = GenerationModel(model, config("llama"), VOCAB_SIZE, tmp_path, 0, torch.device("cpu"))
    rules = Packing(EOD, separate_attention=True, restart_positions=True)
    source = Source("data.data_path", tokens, None, range(1), None)
    # The windows are the samples of the batch, except for the label at the border between the two.
    labels = whole.labels.clone()
    labels[0, -1] = whole.tokens[1, 0]
    expected = forward_only(model, [rules.apply(MicroBatch(whole.tokens, labels))])
    found = evaluate_text(serial, source, None, None, rules)
    assert (found.tokens, found.loss) == (2 * LENGTH, pytest.approx(float(expected) / (2 * LENGTH), rel=1e-6))
    assert abs(evaluate_text(serial, source, None, None).loss - found.loss) > 1e-3
    # A last window that is not full: its padding does not count.
    cut = MicroBatch(whole.tokens[:1], labels[:1], (torch.arange(LENGTH) < 20).float()[None])
    expected = forward_only(model, [rules.apply(cut)])
    found = evaluate_text(serial, source, None, 20, rules)
    assert (found.tokens, found.loss) == (20, pytest.approx(float(expected) / 20, rel=1e-6))
