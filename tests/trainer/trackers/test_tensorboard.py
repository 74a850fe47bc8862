"""Event files of real trainings, read by TensorBoard's own reader, and compared with metrics.jsonl."""

import struct

import pytest

from tests.trainer.trackers.tracked_run import expected, log, prepare, rows, train, train_until_killed
from trainer.trackers.protocol import RunFacts
from trainer.trackers.scalars import BY_SAMPLES
from trainer.trackers.tensorboard_files import TensorBoardFiles

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(folder):
    """Name -> list of steps and numbers, without any thinning."""
    reader = accumulator.EventAccumulator(str(folder), size_guidance={accumulator.SCALARS: 0, accumulator.TENSORS: 0})
    reader.Reload()
    return {name: [(point.step, point.value) for point in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def single(number):
    """The float32 nearest to a number."""
    return struct.unpack("f", struct.pack("f", number))[0]


def check_equal(folder, run):
    """All numbers of metrics.jsonl are in the event files, each once."""
    found, numbers = read(folder), expected(run)
    numbers.pop("samples vs steps")
    by_samples = {
        f"{name} vs samples": [(step * 8, single(value)) for step, value in points.items()]
        for name, points in numbers.items()
        if name in BY_SAMPLES
    }
    by_iteration = {name: [(step, single(value)) for step, value in points.items()] for name, points in numbers.items()}
    assert found == {**by_iteration, **by_samples}


def test_event_files_have_the_numbers_of_metrics_to_the_last_digit(tmp_path):
    run, folder = tmp_path / "run", tmp_path / "events"
    logging = {"tensorboard_dir": str(folder), "log_params_norm": True, "log_layer_norms": True}
    prepare(run, logging=logging)
    train(run)
    assert [row["iteration"] for row in rows(run)] == [1, 2, 3, 3, 4, 5, 6, 6]
    check_equal(folder, run)
    found = read(folder)
    assert {"lm loss", "lm loss validation", "lm loss validation ppl vs samples", "params-norm"} <= set(found)
    assert any(name.startswith("layer_grad_norms/") for name in found)


def test_a_run_that_is_killed_and_resumed_has_no_step_twice(tmp_path):
    run, folder = tmp_path / "run", tmp_path / "events"
    prepare(run, logging={"tensorboard_dir": str(folder)})
    train_until_killed(run)
    assert max(step for step, _ in read(folder)["lm loss"]) == 5
    train(run, number=2)
    assert "resuming from" in log(run, 2) and "at iteration 4" in log(run, 2)
    assert [row["iteration"] for row in rows(run)] == [1, 2, 3, 3, 4, 5, 6, 6]
    check_equal(folder, run)
    assert len(list(folder.iterdir())) == 2


def test_only_the_files_of_the_same_run_are_cut_also_within_a_record(tmp_path):
    def write(run_id, iterations, begins_at=0):
        files = TensorBoardFiles(str(tmp_path), 10)
        files.begin(RunFacts(run_id, run_id, iteration=begins_at))
        for iteration in iterations:
            files.log(iteration, {"lm loss": float(iteration), "samples vs steps": 8.0 * iteration})
        files.end("completed")

    write("b.a", range(1, 4))
    write("a", range(1, 4))
    (own,) = tmp_path.glob("*.llmctl-a")
    own.write_bytes(own.read_bytes() + b"\x09\x00\x00")
    write("a", (3, 4), begins_at=2)
    for path, steps in zip(sorted(tmp_path.iterdir()), ([1, 2, 3], [1, 2], [3, 4]), strict=True):
        assert [step for step, _ in read(path)["lm loss"]] == steps
    content = own.read_bytes()
    own.write_bytes(content + b"\x09\x00\x00")
    write("a", (), begins_at=2)
    assert own.read_bytes() == content


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path):
    run = tmp_path / "run"
    (tmp_path / "file").write_text("")
    prepare(run, logging={"tensorboard_dir": str(tmp_path / "file" / "events")})
    said = train(run)
    assert said.count("TensorBoard could not begin, and gets no numbers of this attempt: NotADirectoryError") == 1
    assert len(rows(run)) == 8
    beat = (run / "attempts/1/heartbeat/rank-00000.json").read_text()
    assert "logging.tensorboard_dir: TensorBoard could not begin" in beat
