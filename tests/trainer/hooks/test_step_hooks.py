"""Hooks of a step: learning rate, metrics, after_step and before_save, in trainings of the example."""

import json

import pytest

from tests.trainer.hooks.hooked_run import log, rate_of_example, rows, train
from tests.trainer.parity.deviation import LIMITS

LOSS = LIMITS["fp32"]["loss"]
RECORDING = """
import os

def record(facts):
    place = os.path.join(os.environ["LLMCTL_RUN_DIR"], f"calls-{facts.mesh.rank}")
    sizes = [list(batch.tokens.shape) for batch in facts.micro_batches]
    norm = sum(float(weight.double().square().sum()) for weight in facts.parameters.values())
    numbers = facts.iteration, facts.losses["lm_loss"], facts.learning_rate, facts.grad_norm
    with open(place, "a") as file:
        print(*numbers, sizes, norm > 0, file=file)

def fail(facts):
    if facts.mesh.rank == 1 and facts.iteration == 2:
        raise OSError("my disk is full")

def rank_number(facts):
    return (float(facts.mesh.rank), 1.0) if facts.iteration != 2 else None

def wrong(facts):
    return 1.0

def negative(step, config):
    return -1.0
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "recording.py").write_text(RECORDING)
    return [folder]


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    return train(tmp_path_factory.mktemp("serial") / "run", "serial")


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_the_example_trains_as_the_serial_run_does(tmp_path, serial, layout):
    found, valid = rows(train(tmp_path / "run", layout))
    expected, expected_valid = rows(serial)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for iteration, row in found.items():
        assert row["learning_rate"] == rate_of_example(iteration - 1)
        assert row["lm_loss"] == pytest.approx(expected[iteration]["lm_loss"], abs=LOSS)
        assert row["metrics"] == pytest.approx(expected[iteration]["metrics"], rel=1e-12)
        assert 0.0 <= row["metrics"]["token_zero_share"] < 1.0
    assert valid[6]["valid_loss"] == pytest.approx(expected_valid[6]["valid_loss"], abs=LOSS)
    saved = [json.loads(line) for line in (tmp_path / "run/saved.jsonl").read_text().splitlines()]
    assert [one["iteration"] for one in saved] == [3, 6]
    assert saved[0]["loss"] == found[3]["lm_loss"]


def test_callbacks_are_called_on_every_rank_with_the_facts_of_the_step(tmp_path, mine):
    hooks = {"after_step": ["recording:record"], "metrics": ["recording:rank_number"]}
    run = train(tmp_path / "run", "tp2", folders=mine, hooks=hooks, training={"train_iters": 3})
    found, _ = rows(run)
    calls = [(run / f"calls-{rank}").read_text() for rank in range(2)]
    expected = [
        f"{row['iteration']} {row['lm_loss']} {row['learning_rate']} {row['grad_norm']} {[[2, 32]] * 4} True\n"
        for row in found.values()
    ]
    assert calls == ["".join(expected)] * 2
    # A mean over the ranks; null where no rank has a number.
    assert [row["metrics"] for row in found.values()] == [
        {"rank_number": 0.5},
        {"rank_number": None},
        {"rank_number": 0.5},
    ]


def test_a_resume_goes_on_with_the_schedule_and_tells_other_hooks(tmp_path, serial):
    run = train(tmp_path / "run", "serial", training={"exit_interval": 3})
    values = {"smoothing": 0.1, "warmup_steps": 4, "highest_loss": 100.0}
    others = {**values, "warmup_steps": 2}
    train(run, "serial", 2, hooks={"settings": others}, training={"train_iters": 4})
    changed = f"hooks.settings: {others} instead of {values}"
    assert f"hooks have changed since the checkpoint: {changed}; the run goes on with the new ones\n" in log(run, 2)
    train(run, "serial", 3)
    assert "hooks have changed since the checkpoint: hooks.settings: {'smoothing': 0.1, 'warmup_steps': 4" in log(
        run, 3
    )

    same = train(tmp_path / "same", "serial", training={"exit_interval": 3})
    train(same, "serial", 2)
    assert "hooks have changed" not in log(same, 2)
    for key in ("lm_loss", "learning_rate", "metrics"):
        assert [row[key] for row in rows(same)[0].values()] == [row[key] for row in rows(serial)[0].values()]


def error(run, rank):
    return json.loads((run / "attempts" / "1" / "errors" / f"rank-{rank:05d}.json").read_text())


def test_an_error_in_a_callback_fails_the_run_with_its_name(tmp_path, mine):
    run = train(tmp_path / "run", "tp2", folders=mine, code=1, hooks={"after_step": ["recording:fail"]})
    assert error(run, 1)["message"] == "hooks.after_step: recording:fail failed: OSError: my disk is full"
    assert not error(run, 1)["consequence"]
    assert 'raise OSError("my disk is full")' in error(run, 1)["traceback"]


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"metrics": ["recording:wrong"]}, "returned 1.0; a metric returns (sum, weight) as two numbers, or None"),
        ({"lr_function": "recording:negative"}, "returned -1.0 for step 0; a learning rate is a number from 0 on"),
    ],
)
def test_a_wrong_answer_fails_the_run(tmp_path, mine, hooks, message):
    run = train(tmp_path / "run", "serial", folders=mine, code=1, hooks=hooks)
    assert message in error(run, 0)["message"]
