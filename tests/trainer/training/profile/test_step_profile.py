"""Profiles of real runs: the traces, the table and the losses, and the ends of a run inside of a profile."""

import gzip
import json
import re

import pytest

from tests.trainer.training.pretraining_job import Job

RANKS = ("rank-00000", "rank-00001")


def write_config(run, logging=None, **training):
    values = {
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 100},
        "training": {"train_iters": 6, "seq_length": 16, "eval_iters": 0, "global_batch_size": 4, **training},
        "optimizer": {"lr": 1e-3},
        "data": {"mock_data": True},
        "logging": logging or {},
    }
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(values))


def train(run, logging=None, world_size=2, fault=None, codes=(0, 0), **training):
    """Train, and return the folder of the profiles."""
    write_config(run, logging, **training)
    with Job(run, world_size, {0: fault} if fault is not None else {}) as job:
        assert job.ends(range(world_size)) == list(codes)
    return run / "attempts/1/profile"


def losses(run):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["iteration"], row["lm_loss"], row["grad_norm"]) for row in rows if "lm_loss" in row]


def names_of(trace):
    return [event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]


def iterations_of(trace):
    return sorted({int(name[10:]) for name in names_of(trace) if re.fullmatch(r"iteration \d+", name)})


def log_of(run, rank="rank-00000"):
    return (run / f"attempts/1/{rank}.log").read_text()


def test_two_ranks_are_profiled_and_the_losses_are_the_same(tmp_path):
    folder = train(tmp_path / "run", {"profile_steps": [2, 4], "profile_ranks": [0, 1]})
    assert {path.name for path in folder.iterdir()} == {f"{r}.{end}" for r in RANKS for end in ("json.gz", "txt")}
    for rank in RANKS:
        trace = folder / f"{rank}.json.gz"
        assert iterations_of(trace) == [2, 3, 4]
        names = set(names_of(trace))
        assert {"aten::addmm", "aten::mm", "data", "forward_backward", "optimizer"} <= names
        assert any(name.endswith("Backward0") or "evaluate_function" in name for name in names)
        assert any("gloo:" in name for name in names)
        told, header, *table = (folder / f"{rank}.txt").read_text().splitlines()
        assert told == f"iteration 4: profile of iterations 2 to 4 in {trace}"
        assert header.split() == ["CPU", "ms", "share"]
        found = {line[:18].strip(): float(line[18:].split()[0]) for line in table}
        assert {"products", "attention", "communication", "optimizer", "waiting for data", "Python"} <= found.keys()
        total = found.pop("whole step")
        assert total > 0.0
        assert sum(found.values()) == pytest.approx(total, abs=0.01 * len(found))
        assert told in log_of(tmp_path / "run", rank).splitlines()
    train(tmp_path / "plain")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert len(losses(tmp_path / "plain")) == 6
    assert not (tmp_path / "plain/attempts/1/profile").exists()


def test_rank_0_tells_of_the_profile_of_another_rank(tmp_path):
    folder = train(tmp_path / "run", {"profile_steps": [2, 2], "profile_ranks": [1]})
    assert iterations_of(folder / "rank-00001.json.gz") == [2]
    assert not (folder / "rank-00000.json.gz").exists()
    told = f"iteration 2: profile of iterations 2 to 2: ranks 1 write to {folder}"
    assert told in log_of(tmp_path / "run").splitlines()


def test_a_run_that_ends_inside_has_the_iterations_until_then(tmp_path):
    folder = train(tmp_path / "run", {"profile_steps": [3, 6]}, world_size=1, codes=[0], exit_interval=4)
    assert iterations_of(folder / "rank-00000.json.gz") == [3, 4]
    assert "iteration 4: profile of iterations 3 to 4 in " in log_of(tmp_path / "run")
    assert json.loads((tmp_path / "run/attempts/1/outcome.json").read_text())["reason"] == "stopped"


def test_the_last_iterations_can_be_profiled(tmp_path):
    folder = train(tmp_path / "run", {"profile_steps": [5, 6]}, world_size=1, codes=[0])
    assert iterations_of(folder / "rank-00000.json.gz") == [5, 6]


def fail_in_step_4():
    """Fail inside of an iteration."""
    from trainer.training.loop import TrainingLoop

    step = TrainingLoop._forward_backward

    def failing(self, micro_batches, divisors, iteration):
        if iteration == 3:
            raise ValueError("the fault of this test")
        return step(self, micro_batches, divisors, iteration)

    TrainingLoop._forward_backward = failing


def test_a_failure_inside_is_told_as_without_a_profile(tmp_path):
    folder = train(tmp_path / "run", {"profile_steps": [3, 5]}, 1, fail_in_step_4, codes=[1])
    error = json.loads((tmp_path / "run/attempts/1/errors/rank-00000.json").read_text())
    assert (error["type"], error["message"], error["iteration"]) == ("ValueError", "the fault of this test", 3)
    assert not folder.exists()


def put_a_file_in_the_way():
    """Leave the profile no folder."""
    import os
    from pathlib import Path

    Path(os.environ["LLMCTL_RUN_DIR"], "attempts/1").mkdir(parents=True, exist_ok=True)
    Path(os.environ["LLMCTL_RUN_DIR"], "attempts/1/profile").write_text("")


def fill_the_disk():
    """Let no file grow beyond 150 kB, which a trace does and the rest of this run does not."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("fault", [put_a_file_in_the_way, fill_the_disk])
def test_a_profile_that_cannot_be_written_is_told_in_one_line(tmp_path, fault):
    folder = train(tmp_path / "run", {"profile_steps": [2, 4]}, 1, fault, codes=[0])
    told = [line for line in log_of(tmp_path / "run").splitlines() if "profile of" in line]
    assert len(told) == 1
    where = f"iteration 4: profile of iterations 2 to 4 could not be written to {folder}/rank-00000.json.gz: "
    assert told[0].startswith(where)
    assert told[0].endswith("; training goes on")
    assert [number for number, *_ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert folder.is_file() or list(folder.iterdir()) == []
