"""A loss of the user's own: the built-in one again, in every layout, and mistakes."""

import json
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F

from tests.trainer.hooks.hooked_run import WORLD_SIZES, rows, train, without
from tests.trainer.parity.deviation import LIMITS
from tests.trainer.parity.parity_case import VOCAB_SIZE, Case
from tests.trainer.spawn import DEADLINE_S
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward, forward_only

LIMIT = LIMITS["fp32"]
MINE = """
import torch.nn.functional as F

def plain(logits, labels, config):
    assert logits.shape == (len(labels), 250), logits.shape
    return F.cross_entropy(logits.float(), labels, reduction="none")

def mean(logits, labels, config):
    return F.cross_entropy(logits.float(), labels)
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "losses.py").write_text(MINE)
    return [folder]


def losses(run):
    training, valid = rows(run)
    return [row["lm_loss"] for row in training.values()], [row["valid_loss"] for row in valid.values()]


@pytest.mark.parametrize("layout", WORLD_SIZES)
def test_cross_entropy_as_a_function_trains_as_the_built_in_one(tmp_path, mine, layout):
    others = without("lr_function", "metrics", "after_step", "before_save")
    built_in = train(tmp_path / "built_in", layout, hooks={**others, "loss_function": None})
    own = train(tmp_path / "own", layout, folders=mine, hooks={**others, "loss_function": "losses:plain"})
    for found, expected in zip(losses(own), losses(built_in), strict=True):
        assert found == pytest.approx(expected, abs=LIMIT["loss"])
    norms = [[row["grad_norm"] for row in rows(run)[0].values()] for run in (own, built_in)]
    assert norms[0] == pytest.approx(norms[1], rel=LIMIT["grad_norm"])


def test_a_mean_over_tokens_is_refused(tmp_path, mine):
    run = train(tmp_path / "run", "serial", folders=mine, code=1, hooks={"loss_function": "losses:mean"})
    said = json.loads((run / "attempts/1/errors/rank-00000.json").read_text())["message"]
    assert said == (
        "hooks.loss_function: losses:mean returned the shape []; a loss returns one number per label, of shape [64]"
    )


def smoothed(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=0.2)


def step(rank, world_size, case, token_loss):
    """Loss of one iteration in training and in evaluation, and the norm of its gradient; 0 losses without the head."""
    config = case.config()
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    model = build_model(config, VOCAB_SIZE, mesh, groups, torch.device("cpu"), token_loss=token_loss)
    optimizer = MixedPrecisionOptimizer(config, model)
    batches = case.batch(0)[mesh.dp_rank :: mesh.dp]
    evaluated = float(forward_only(model, batches)) / case.valid_tokens(0)
    loss = forward_backward(
        model,
        batches,
        valid_tokens=case.valid_tokens(0),
        loss_scale=optimizer.loss_scaler.scale,
        randomness=StepRandomness(config.training.seed, 0),
    )
    share = float(mesh.tp_rank == 0)
    return share * float(loss) / case.valid_tokens(0), share * evaluated, optimizer.step(1e-3).grad_norm


LLAMA = Case("llama", micro_batches=2)
LAYOUTS = [
    LLAMA.but(tp=2),
    LLAMA.but(tp=2, sp=True, dp=2, micro_batches=1),
    LLAMA.but(cp=2, tp=2),
    LLAMA.but(pp=2, schedule="zb-h1"),
    # A word table on both ends, and vocabulary padding.
    Case("qwen", tp=2, pp=2, micro_batches=2),
    LLAMA.but(dp=2, zero=3, micro_batches=1),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_layout_has_the_loss_and_gradient_of_the_serial_run(ranks, case):
    [(loss, evaluated, norm)] = ranks.run(step, case.serial, smoothed, world_size=1)
    found = ranks.run(step, case, smoothed, world_size=case.world_size)
    assert sum(one for one, _, _ in found) == pytest.approx(loss, abs=LIMIT["loss"])
    assert sum(one for _, one, _ in found) == pytest.approx(evaluated, abs=LIMIT["loss"])
    assert [one for _, _, one in found] == pytest.approx([norm] * len(found), rel=LIMIT["grad_norm"])
