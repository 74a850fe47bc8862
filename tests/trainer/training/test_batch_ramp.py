"""A batch that grows: the same run on every layout, and exact resumes, also across a change of size."""

import json

import pytest

from tests.resume_torture import config_of, rows
from tests.trainer.training.pretraining_job import Job
from trainer.checkpoint.directory import checkpoint_path

RAMP = [4, 4, 24]
SIZES = [4, 4, 4, 8, 8, 12, 12, 12]
"""Of the iterations, of micro-batches of two samples."""
CONSUMED = [sum(SIZES[: number + 1]) for number in range(len(SIZES))]
SHOWN = {"lm_loss", "valid_loss", "grad_norm", "learning_rate", "consumed_tokens", "batch_size"}
LAYOUTS = {
    "serial": (1, {}),
    "dp2": (2, {"use_distributed_optimizer": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "interleaved": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
}


def prepare(run, layout="serial", **sections):
    """Write the config of a training that passes all sizes; returns its number of ranks."""
    values = config_of("tp2")
    world_size, values["parallel"] = LAYOUTS[layout]
    changes = {
        "model": {"num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        "training": {
            **{"train_iters": len(SIZES), "global_batch_size": 12, "rampup_batch_size": RAMP, "eval_interval": 4},
            **{"kernel_backend": "reference"},
        },
        "logging": {"log_batch_size": True},
        "checkpoint": {"save_interval": 4},
    }
    for section, keys in [*changes.items(), *sections.items()]:
        values[section] = {**values.get(section, {}), **keys}
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(values))
    return world_size


def draw_nothing():
    """A draw of initial values ends the rank."""
    from trainer.model.initial_values import RandomMatrix

    RandomMatrix._draw = None


def train(run, world_size, number=1, faults=None):
    with Job(run, world_size, faults, number=number) as job:
        ends = job.ends(range(world_size))
        assert ends == [0] * world_size, (run / "attempts" / str(number) / "rank-00000.log").read_text()
    return rows(run)


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """Folder and rows of one rank's run."""
    run = tmp_path_factory.mktemp("serial") / "run"
    return run, train(run, prepare(run))


def tensors(run):
    folder = checkpoint_path(run / "checkpoints", len(SIZES))
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def assert_same_run(found, expected):
    assert found.keys() == expected.keys()
    for key, row in found.items():
        for name in SHOWN & row.keys():
            assert row[name] == pytest.approx(expected[key][name], rel=2e-4), (key, name)


def test_sizes_samples_and_speeds_are_those_of_each_batch(serial):
    run, found = serial
    assert [found[number + 1, False]["batch_size"] for number in range(len(SIZES))] == SIZES
    assert [found[number + 1, False]["consumed_samples"] for number in range(len(SIZES))] == CONSUMED
    timed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = [row for row in timed if "lm_loss" in row]
    tokens = [row["tokens_per_s"] * row["iteration_time_s"] for row in timed]
    assert tokens == pytest.approx([size * 32 for size in SIZES])
    log = (run / "attempts" / "1" / "rank-00000.log").read_text()
    assert "4 to 12 sequences (by 4, within 24 samples) of 32 tokens per iteration" in log


def test_the_learning_rate_follows_the_samples(serial):
    _, found = serial
    # Megatron-LM's scheduler counts samples: a warmup of 3 full batches ends after 36.
    warmup = [found[number + 1, False]["learning_rate"] for number in range(6)]
    assert warmup == pytest.approx([1e-3 * consumed / 36 for consumed in [0, *CONSUMED[:5]]])


@pytest.mark.parametrize("layout", ["dp2", "pp2", "interleaved", "pp4"])
def test_every_layout_trains_the_same_run(serial, tmp_path, layout):
    assert_same_run(train(tmp_path / "run", prepare(tmp_path / "run", layout)), serial[1])


@pytest.mark.parametrize("end", [2, 3, 4, 6])
def test_a_resume_equals_the_whole_run_bit_for_bit(serial, tmp_path, end):
    run = tmp_path / "run"
    train(run, prepare(run, training={"exit_interval": end}))
    # All weights come from the checkpoint.
    resumed = train(run, prepare(run), number=2, faults={0: draw_nothing})
    assert resumed == serial[1]
    assert tensors(run) == tensors(serial[0])


def test_a_resume_on_other_replicas_goes_on(serial, tmp_path):
    run = tmp_path / "run"
    train(run, prepare(run, "dp2", training={"exit_interval": 4}))
    assert_same_run(train(run, prepare(run), number=2), serial[1])


def test_streamed_text_is_read_in_growing_batches(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{number} " * 40}) + "\n" for number in range(200)))
    data = {"mock_data": False, "streaming": True, "data_path": [str(text)], "split": "80,20,0", "num_workers": 1}
    data |= {"tokenizer_type": "NullTokenizer"}
    losses = {}
    for layout in ("serial", "pp2"):
        run = tmp_path / layout
        losses[layout] = train(run, prepare(run, layout, data=data))
    assert_same_run(losses["pp2"], losses["serial"])


def test_skipped_steps_do_not_move_the_schedule(tmp_path):
    run = tmp_path / "run"
    half = {"fp16": True, "initial_loss_scale": 2.0**26, "loss_scale_window": 1000, "hysteresis": 1}
    found = train(run, prepare(run, training={**half, "train_iters": 14, "eval_iters": 0}))
    place, rates = 0, []
    for number in range(14):
        row = found[number + 1, False]
        rates.append((row["learning_rate"], 1e-3 * place / 36))
        place += 0 if row["grad_norm"] is None else row["batch_size"]
    assert {row["grad_norm"] is None for row in found.values()} == {True, False}
    rising = [pair for pair in rates if pair[1] <= 1e-3]
    assert rising[-1][1] > 0
    assert [rate for rate, _ in rising] == pytest.approx([expected for _, expected in rising])
