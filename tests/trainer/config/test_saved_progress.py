"""Saved progress by saved.json, and of older runs by outcome.json and metrics.jsonl."""

import json

import pytest

from trainer.config.records.saved_progress import find_saved_progress, record_of


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def trained(*iterations):
    return [{"iteration": iteration, "lm_loss": 1.0} for iteration in iterations]


def find(record=None, metrics=b"", outcomes=(), save_interval=100):
    return find_saved_progress("/runs/a", record, metrics, outcomes, save_interval)


def test_the_record_decides():
    record = json.dumps(record_of(400, "/mnt/ckpt", 1, 0.0)).encode()
    saved = find(record, lines(*trained(540, 550)))
    assert (saved.iteration, saved.trained) == (400, 550)
    assert saved.missing("/mnt/ckpt", "is empty") == (
        "checkpoint folder /mnt/ckpt is empty, but the run has trained to iteration 550 and saved until 400 "
        "(metrics.jsonl, saved.json); mount or restore the folder and resume, or start from scratch with a new run: "
        "llmctl submit /runs/a/config.yaml"
    )
    assert "saved until 400 in /mnt/ckpt (metrics.jsonl" in saved.missing("/elsewhere", "is empty")


def test_a_run_that_saved_nothing_may_begin_again():
    record = json.dumps(record_of(None, "/mnt/ckpt", 1, 0.0)).encode()
    assert find(record, lines(*trained(540, 550))) is None, "each save was missed or postponed"
    assert find() is None


def test_a_damaged_record_is_not_believed():
    assert find(b"\x00\x00", lines(*trained(550))).iteration == 500
    assert find(b"[]", lines(*trained(550))).iteration == 500


@pytest.mark.parametrize(
    ("metrics", "save_interval", "iteration"),
    [
        (trained(99, 100), 100, None),  # killed in the first save, at the latest
        (trained(100, 101), 100, 100),
        (trained(201, 1, 2), 100, 200),  # already begun again by an older release
        (trained(100, 250), None, None),
        ([*trained(200), {"iteration": 200, "missed_save": "full"}, *trained(250)], 100, 100),
        ([*trained(100), {"iteration": 100, "missed_save": "full"}, *trained(150)], 100, None),
    ],
)
def test_an_older_run_is_judged_by_the_iterations_after_a_due_save(metrics, save_interval, iteration):
    saved = find(None, lines(*metrics) + b'{"iteration": 9', save_interval=save_interval)
    assert (saved and saved.iteration) == iteration


def test_an_older_run_that_ended_regularly_has_saved():
    outcomes = [None, b'{"reason": "stopped", "iteration": 120}', b"{"]
    assert find(None, lines(*trained(120)), outcomes, save_interval=None).iteration == 120
