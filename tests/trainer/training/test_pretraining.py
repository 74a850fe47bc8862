"""Whole runs of two ranks: their ends, and the files that they leave."""

import json
import math

import pytest
import torch

from tests.resume_torture import Attempt, config_of, last_row, rows, wait_until
from tests.waiting import HANG_S
from trainer.checkpoint.directory import complete_iterations
from trainer.checkpoint.resume import OTHER_KERNELS
from trainer.data.commands.preprocess import tokenize_documents
from trainer.data.tokenizers.null import NullTokenizer
from trainer.process.precision import cpu_has_fast_products


def start(run, variant="dp2 fp16", number=1, **changes):
    values = config_of(variant)
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(values))
    return Attempt(run, number)


def end(attempt):
    for rank in attempt.ranks:
        rank.join(timeout=HANG_S)
    return [rank.exitcode for rank in attempt.ranks]


# Learning rate too small to change any weight.
FLAT = {"lr": 1e-30, "min_lr": 0.0, "lr_warmup_iters": 0}


def log(run, rank=0, number=1):
    return (run / "attempts" / str(number) / f"rank-{rank:05d}.log").read_text()


def error(run, rank):
    return json.loads((run / "attempts" / "1" / "errors" / f"rank-{rank:05d}.json").read_text())


def test_stop_file_saves_and_leaves_together(tmp_path):
    run = tmp_path / "run"
    with start(
        run, "tp2", training={"train_iters": 100000, "eval_interval": 1}, checkpoint={"save_interval": 1000}
    ) as attempt:
        assert wait_until(attempt, lambda: last_row(run)["iteration"] > 0)
        (run / "attempts" / "1" / "stop").touch()
        assert attempt.finish() == "stopped"
    outcome = json.loads((run / "attempts/1/outcome.json").read_text())
    last = max(iteration for iteration, _ in rows(run))
    assert outcome["iteration"] == last
    assert complete_iterations(run / "checkpoints") == [last]
    assert f"stopped at iteration {last}" in log(run)
    # After a stop request the run does not evaluate, neither before nor after its save.
    assert {iteration for iteration, is_valid in rows(run) if is_valid} == set(range(1, last))
    beats = [json.loads((run / f"attempts/1/heartbeat/rank-0000{rank}.json").read_text()) for rank in range(2)]
    assert beats[1]["phase"] == "stopped"
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "lm_loss" in line][-1]
    assert max(beat["peak_memory_bytes"] for beat in beats) == last["peak_memory_bytes"]


def logged(run):
    """Loss of every training row."""
    return {iteration: row["lm_loss"] for (iteration, is_valid), row in rows(run).items() if not is_valid}


def test_the_last_iteration_is_logged_and_a_resume_continues_its_interval(tmp_path):
    keys = {"train_iters": 7, "eval_iters": 0}
    for name, changes in (("each", {}), ("five", {"logging": {"log_interval": 5}})):
        with start(tmp_path / name, "tp2", training=keys, **changes) as attempt:
            assert attempt.finish() == "completed"
    each, five = logged(tmp_path / "each"), logged(tmp_path / "five")
    assert list(five) == [5, 7]
    assert five[7] == pytest.approx((each[6] + each[7]) / 2, rel=1e-9)
    assert "\n7/7  loss " in log(tmp_path / "five")

    parts = tmp_path / "parts"
    for number, exit_at in ((1, 3), (2, None)):
        training = {**keys, "exit_interval": exit_at}
        with start(parts, "tp2", number, training=training, logging={"log_interval": 5}) as attempt:
            assert attempt.finish() == ("stopped" if exit_at else "completed")
    assert logged(parts) == {3: pytest.approx(sum(each[i] for i in (1, 2, 3)) / 3, rel=1e-9), **five}


def test_a_run_stopped_within_an_interval_logs_its_last_iteration(tmp_path):
    run = tmp_path / "run"
    changes = {"training": {"train_iters": 100000, "eval_iters": 0}, "logging": {"log_interval": 100000}}
    with start(run, "tp2", **changes) as attempt:
        beat = run / "attempts/1/heartbeat/rank-00000.json"
        assert wait_until(attempt, lambda: beat.exists() and json.loads(beat.read_text())["iteration"] > 0)
        (run / "attempts" / "1" / "stop").touch()
        assert attempt.finish() == "stopped"
    assert list(logged(run)) == [json.loads((run / "attempts/1/outcome.json").read_text())["iteration"]]


def test_a_stopped_run_saves_before_it_evaluates(tmp_path):
    run = tmp_path / "run"
    with start(run, "tp2", training={"exit_interval": 2, "eval_interval": 2}) as attempt:
        assert attempt.finish() == "stopped"
    said = log(run)
    assert 0 < said.index("iteration 2 saved") < said.index("2/20  validation loss")
    assert said.count("iteration 2 saved") == 1


def test_a_completed_run_reports_it_and_evaluation_repeats_the_same_samples(tmp_path):
    run = tmp_path / "run"
    with start(run, "pp2", training={"train_iters": 2, "eval_interval": 1}, optimizer=FLAT) as one:
        assert one.finish() == "completed"
    found = rows(run)
    assert found[1, True]["valid_loss"] == pytest.approx(found[2, True]["valid_loss"], rel=1e-9)
    before = (run / "metrics.jsonl").read_text()
    with start(run, "pp2", number=2, training={"train_iters": 2}, optimizer=FLAT) as again:
        assert again.finish() == "completed"
    assert "nothing left to train: iteration 2 has reached train_iters 2" in log(run, number=2)
    assert (run / "metrics.jsonl").read_text() == before


def test_exploding_weights_are_counted_and_skipped(tmp_path):
    run = tmp_path / "run"
    keys = {"lr": 1e38, "min_lr": 0.0, "clip_grad": 0.0, "lr_warmup_iters": 0}
    with start(run, "tp2", optimizer=keys, training={"train_iters": 4, "eval_iters": 0}) as attempt:
        assert attempt.finish() == "completed"
    found = rows(run)
    assert found[1, False]["nan_iterations"] == 0
    assert found[4, False]["nan_iterations"] == 3
    assert found[4, False]["skipped_iterations"] == 0
    assert found[4, False]["lm_loss"] is None
    assert found[4, False]["grad_norm"] is None
    assert found[4, False]["learning_rate"] == found[2, False]["learning_rate"]  # a skipped step does not count


def test_losses_of_further_tokens_are_logged_apart_also_after_a_resume(tmp_path):
    run, model = tmp_path / "run", {"mtp_num_layers": 2, "position_embedding_type": "rope"}
    keys = {"train_iters": 3, "eval_iters": 0}
    with start(run, "pp2", model=model, training={**keys, "exit_interval": 2}) as attempt:
        assert attempt.finish() == "stopped"
    with start(run, "pp2", number=2, model=model, training=keys) as attempt:
        assert attempt.finish() == "completed"
    for iteration in (1, 2, 3):
        losses = [rows(run)[iteration, False][name] for name in ("lm_loss", "mtp_1_loss", "mtp_2_loss")]
        assert len(set(losses)) == 3 and min(losses) > 0
    assert f"  mtp 2 loss {losses[2]:.4f}  " in log(run, number=2)


def test_fp16_finds_its_loss_scale(tmp_path):
    run = tmp_path / "run"
    with start(run, training={"initial_loss_scale": 2.0**40, "train_iters": 30, "eval_iters": 0}) as attempt:
        assert attempt.finish() == "completed"
    last = rows(run)[30, False]
    assert 0 < last["skipped_iterations"] < 30
    assert last["loss_scale"] < 2.0**40
    assert last["grad_norm"] is None or last["grad_norm"] > 0
    is_slow = not cpu_has_fast_products(torch.float16)
    assert [log(run, rank).count("training.fp16: matrix products") for rank in (0, 1)] == [is_slow, 0]


def test_data_that_cannot_be_used_ends_before_the_ranks_meet(tmp_path):
    run = tmp_path / "run"
    with start(run, data={"mock_data": False, "data_path": [str(tmp_path / "nothing")]}) as attempt:
        assert end(attempt) == [3, 3]
    assert error(run, 1)["type"] == "DataError"
    assert error(run, 1)["module"].startswith("trainer.")
    assert error(run, 1)["coordinates"] == "rank 1 (pp 0, dp 1, tp 0)"
    assert log(run, 1).count("\n") == 1
    assert "Traceback" not in log(run, 1)


def test_gpus_are_not_silently_left_out(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    run = tmp_path / "run"
    with start(run, training={"device": "cuda"}) as attempt:
        assert end(attempt) == [3, 3]
    assert "training.device: cuda is requested, but torch" in log(run)
    assert "training.device: cpu" in log(run)


def test_a_dead_rank_ends_the_other_at_once(tmp_path):
    run = tmp_path / "run"
    with start(run, "tp2", training={"train_iters": 100000}) as attempt:
        assert wait_until(attempt, lambda: last_row(run)["iteration"] > 0)
        attempt.ranks[1].kill()
        assert end(attempt) == [1, -9]
    found = error(run, 0)
    assert found["iteration"] >= 1
    assert found["consequence"] is True
    assert f"rank 0 (pp 0, dp 0, tp 0) at iteration {found['iteration']}: peer failure in " in log(run)
    assert "no error record from rank 1 (pp 0, dp 0, tp 1)" in log(run)


def test_missing_checkpoint_to_start_from(tmp_path):
    run = tmp_path / "run"
    with start(run, checkpoint={"load": str(tmp_path / "nothing")}) as attempt:
        assert end(attempt) == [3, 3]
    assert "checkpoint.load" in log(run)


def test_a_resume_with_other_kernels_is_reported(tmp_path):
    def resume(number, adamw, exit_at):
        training = {"kernel_backend": "reference", "kernel_backends": {"adamw": adamw}, "exit_interval": exit_at}
        with start(tmp_path / "run", "tp2", number, training=training) as attempt:
            assert attempt.finish() == "stopped"
        return [line for line in log(tmp_path / "run", number=number).splitlines() if line.startswith(OTHER_KERNELS)]

    assert resume(1, "reference", 2) == []
    assert resume(2, "torch", 3) == [
        f"{OTHER_KERNELS}: adamw: torch instead of reference; results differ by rounding from those of an "
        "uninterrupted run"
    ]
    assert resume(3, "torch", 4) == []


def test_labels_that_count_are_counted_once_in_every_layout(tmp_path):
    texts = [" ".join(str((number * place) % 250) for place in range(1, 4 + number % 9)) for number in range(300)]
    tokenize_documents(texts, NullTokenizer(250), tmp_path / "d")
    data = {
        "mock_data": False,
        "data_path": str(tmp_path / "d"),
        "tokenizer_type": "NullTokenizer",
        "eod_mask_loss": True,
        "split": "60,40",
    }
    changes = {
        "data": data,
        "model": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
        "training": {"train_iters": 2, "eval_interval": 2},
        "optimizer": {"lr_warmup_iters": 0},
    }
    found = {}
    for axis in ("data", "tensor", "pipeline", "context"):
        parallel = {} if axis == "data" else {f"{axis}_{'' if axis == 'context' else 'model_'}parallel_size": 2}
        run = tmp_path / axis
        with start(run, "pp2", **changes, parallel={"pipeline_model_parallel_size": 1, **parallel}) as attempt:
            assert attempt.finish() == "completed"
        found[axis] = [rows(run)[2, False]["lm_loss"], rows(run)[2, True]["valid_loss"]]
    for losses in found.values():
        assert losses == pytest.approx(found["data"], rel=1e-5)
    # With such small untrained weights every token has about the same loss, so the divisor was the right count.
    assert found["data"] == pytest.approx([math.log(251)] * 2, rel=0.04)


def test_a_resume_goes_on_with_the_schedule_of_its_checkpoint(tmp_path):
    """Megatron-LM's --use-checkpoint-opt_param-scheduler: twice, so that the second checkpoint has the first's."""
    first = {"lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_iters": 0, "lr_decay_iters": 8}
    other = {"lr": 5e-2, "min_lr": 0.0, "lr_decay_style": "cosine", "lr_warmup_iters": 1, "lr_decay_iters": 9}

    def rates(run, number, exit_at, optimizer):
        with start(run, "tp2", number, training={"exit_interval": exit_at}, optimizer=optimizer) as attempt:
            assert attempt.finish() == "stopped"
        return {iteration: row["learning_rate"] for (iteration, is_valid), row in rows(run).items() if not is_valid}

    expected = rates(tmp_path / "whole", 1, 6, first)
    run = tmp_path / "run"
    rates(run, 1, 2, first)
    for number, exit_at in ((2, 4), (3, 6)):
        seen = rates(run, number, exit_at, {**other, "use_checkpoint_opt_param_scheduler": True})
    assert seen == expected
    assert "goes on: lr 0.01 instead of 0.05, min_lr 0.001 instead of 0.0, lr_decay_style 'linear'" in log(run, 0, 3)
    changed = rates(run, 4, 8, other)
    assert changed[7] != 1e-2 - 6 / 8 * 9e-3


def test_a_decoupled_rate_follows_the_schedule_and_survives_a_resume(tmp_path):
    keys = {"lr": 1e-2, "lr_decay_style": "linear", "lr_warmup_iters": 1, "lr_decay_iters": 6}

    def losses(name, exits, **more):
        for number, exit_at in enumerate(exits, 1):
            changes = {"training": {"exit_interval": exit_at}, "optimizer": {**keys, **more}}
            with start(tmp_path / name, "zero1 bf16, bf16 moments, remainders", number, **changes) as attempt:
                assert attempt.finish() == "stopped"
        return logged(tmp_path / name)

    own = {"decoupled_lr": 0.2, "decoupled_min_lr": 0.1}
    whole = losses("whole", [6], **own)
    assert losses("resumed", [3, 6], **own) == whole
    assert losses("usual", [6]) != whole
    # The first step, of lr 0, changes nothing, and a rate of 0.01 for these weights is that of the others.
    assert losses("same", [6], decoupled_lr=1e-2) == losses("again", [6])
