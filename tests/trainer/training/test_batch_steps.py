"""Batch sizes in steps: the same run on replicas, and exact resumes, within a step and at its beginning."""

import pytest

from tests.trainer.training import test_batch_ramp as ramp

# Samples have 32 tokens: the steps begin at samples 0, 10 and 31.
STEPS = {"rampup_batch_size": [], "global_batch_size": None, "step_batch_size_schedule": "0:4 320:12 1K:8"}
SIZES = [4, 4, 4, 12, 12, 8, 8, 8]
CONSUMED = [sum(SIZES[: number + 1]) for number in range(len(SIZES))]


def prepare(run, layout="serial", **training):
    return ramp.prepare(run, layout, training={**STEPS, **training})


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """Folder and rows of one rank's run."""
    run = tmp_path_factory.mktemp("serial") / "run"
    return run, ramp.train(run, prepare(run))


def test_sizes_and_learning_rate_follow_the_samples(serial):
    run, found = serial
    shown = [found[number + 1, False] for number in range(len(SIZES))]
    assert [(row["batch_size"], row["consumed_samples"]) for row in shown] == list(zip(SIZES, CONSUMED, strict=True))
    # A warmup of 3 batches of the last size ends after 24 samples.
    rates = [row["learning_rate"] for row in shown[:5]]
    assert rates == pytest.approx([1e-3 * consumed / 24 for consumed in [0, *CONSUMED[:4]]])
    log = (run / "attempts" / "1" / "rank-00000.log").read_text()
    assert "4 to 8 sequences (3 steps, the last from sample 31 on) of 32 tokens per iteration" in log


def test_replicas_train_the_same_run(serial, tmp_path):
    run = tmp_path / "run"
    ramp.assert_same_run(ramp.train(run, prepare(run, "dp2")), serial[1])


@pytest.mark.parametrize("end", [2, 3, 4, 5])
def test_a_resume_equals_the_whole_run_bit_for_bit(serial, tmp_path, end):
    run = tmp_path / "run"
    ramp.train(run, prepare(run, exit_interval=end))
    assert ramp.train(run, prepare(run), number=2) == serial[1]
    assert ramp.tensors(run) == ramp.tensors(serial[0])


def test_the_schedule_of_a_checkpoint_goes_on(serial, tmp_path):
    run = tmp_path / "run"
    ramp.train(run, prepare(run, exit_interval=4))
    other = {"lr_warmup_iters": 1, "use_checkpoint_opt_param_scheduler": True}
    assert ramp.train(run, ramp.prepare(run, training=STEPS, optimizer=other), number=2) == serial[1]


def test_steps_with_the_sizes_of_a_ramp_train_the_same_run(tmp_path):
    # The steps begin at samples 0, 12 and 25.
    steps = {**STEPS, "step_batch_size_schedule": "0:4 384:8 800:12"}
    found = {}
    for name, training in (("steps", steps), ("ramp", {})):
        found[name] = ramp.train(tmp_path / name, ramp.prepare(tmp_path / name, training=training))
    assert [found["steps"][number + 1, False]["batch_size"] for number in range(8)] == ramp.SIZES
    assert found["steps"] == found["ramp"]
    # A batch of another number of samples than its loss is divided by would have a loss apart from the others.
    losses = [found["steps"][number + 1, False]["lm_loss"] for number in range(8)]
    assert losses == pytest.approx([losses[0]] * 8, rel=0.3)
