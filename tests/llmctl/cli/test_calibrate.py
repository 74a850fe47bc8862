"""``llmctl plan --calibrate``: from rows of metrics to plans that meet them."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.context import Context
from llmctl.runs.series.columns import parse_columns
from llmctl.runs.series.history import RunHistory
from llmctl.runs.series.steady import KEYS, steady_step
from tests.llmctl.operate.report.made_runs import add, made_run, row, trained
from tests.llmctl.run_directories import TRANSPORT

STEPS = 12


def measured(root: Path, number: int, *, seconds: float, ranks: int = 1, **changes: object) -> None:
    """Put a run with steps of ``seconds`` into the user's index."""
    run = made_run(root / "runs", f"run-261127-12000{number}-abcd", name=f"run{number}", cluster="local", **changes)
    config = dict(run.record.config or {})
    config["parallel"] = {"tensor_model_parallel_size": ranks}
    run.record = replace(run.record, config=config, job={**run.record.job, "nodes": ranks})
    run.record.save(TRANSPORT)
    trained(run, steps=0)
    with (run.path / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            # The first steps wait for compilers.
            time = 60.0 if step < 4 else seconds * (1 + 0.01 * (step % 3 - 1))
            file.write(json.dumps({**row(step, 1, 1e9 + step, 3.0), "iteration_time_s": time}) + "\n")
    add(Context.of((), (), os.environ), run)


@pytest.fixture
def place(own_folders: Path) -> Path:
    (own_folders / "runs").mkdir(exist_ok=True)
    return own_folders


def planned(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["plan", *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_plans_meet_the_runs_afterwards(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "1", "--set", "training.global_batch_size=16")
    before = planned(*words, capsys=capsys)
    slow = 3 * float(str(before["iteration_time_s"]))
    for number in range(3):
        measured(place, number, seconds=slow)
    assert main(["plan", "--calibrate"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].split() == ["NAME", "STEP", "S", "BEFORE", "AFTER", "MEMORY", "AFTER", "LAYOUT"]
    assert "-67%" in shown.out and "median error of the time: 66.7% before" in shown.out
    assert "calibrations/local.json" in shown.err
    after = planned(*words, capsys=capsys)
    assert (before["calibrated_by"], after["calibrated_by"]) == (0, 3)
    assert after["iteration_time_s"] == pytest.approx(slow, rel=0.1)
    # 600 MiB were measured, which activations and logits explain.
    assert after["peak_memory_bytes"] == pytest.approx(600 << 20, rel=0.2)
    assert planned("--uncalibrated", *words, capsys=capsys) == before
    assert main(["plan", *words]) == 0
    assert "fitted    to 3 of your runs there, on 20" in capsys.readouterr().out


@pytest.mark.usefixtures("place")
def test_a_submission_keeps_what_was_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "1", "--set", "training.global_batch_size=4", "--set", "training.train_iters=2")
    predicted = planned(*words, capsys=capsys)
    assert main(["submit", *words, "--name", "kept", "--follow", "--json"]) == 0
    run_dir = Path(json.loads(capsys.readouterr().out)["run_dir"])
    record = json.loads((run_dir / "run.json").read_text())
    assert record["submissions"][-1]["predicted"] == {
        "iteration_time_s": pytest.approx(predicted["iteration_time_s"]),
        "peak_memory_bytes": predicted["peak_memory_bytes"],
        "device": "CPU",
        "calibrated_by": 0,
    }


def test_submit_uses_it_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--nodes", "1", "--set", "training.global_batch_size=16", "--dry-run"]
    assert main(words) == 0
    before = capsys.readouterr().out
    measured(place, 1, seconds=500.0)
    assert main(["plan", "--calibrate", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 1
    assert main(words) == 0
    after = capsys.readouterr().out
    assert _estimate(before) != _estimate(after)


def _estimate(shown: str) -> str:
    return next(line for line in shown.splitlines() if line.startswith("  estimate"))


def test_runs_that_cannot_be_compared_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--calibrate"]) == 2
    assert "no run of yours on local can be compared" in capsys.readouterr().err
    run = made_run(place / "runs", "few-261127-120009-abcd", name="few", cluster="local")
    add(Context.of((), (), os.environ), trained(run, steps=4))
    command = made_run(place / "runs", "cmd-261127-120008-abcd", name="cmd", cluster="local", config=None)
    add(Context.of((), (), os.environ), command)
    assert main(["plan", "--calibrate"]) == 2
    said = capsys.readouterr().err
    assert "few: has fewer than 6 rows of training" in said and "cmd: is a COMMAND, not a training" in said


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("others", [["c.yaml"], ["--nodes", "2"], ["--search"], ["--uncalibrated"], ["--set", "a.b=1"]])
def test_nothing_else_goes_with_it(others: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--calibrate", *others]) == 2
    assert "leave all but --cluster and --json out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "factors": {"products": -1}, "runs": []}']
)
def test_a_damaged_file_is_told(place: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    measured(place, 1, seconds=5.0)
    assert main(["plan", "--calibrate"]) == 0
    path = place / "state/llmctl/calibrations/local.json"
    assert f"kept in {path};" in capsys.readouterr().err
    path.write_text(text)
    assert main(["plan", "--set", "training.global_batch_size=16"]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and "--calibrate --cluster local" in said
    # It helps.
    assert main(["plan", "--calibrate"]) == 0


def hardware(place: Path, run_id: str, share: float) -> None:
    """Keep a measurement in which products reach a share of what a CPU does by the table of devices."""
    given = {"dtype": "float32", "group": "device", "slowest_host": "h", "ranks": 1, "repetitions": 3, "bytes": None}
    rate = 0.2e12 * share
    product = {"what": "product", "shape": [4096] * 3, "work": rate, "seconds": 1.0, "rate": rate}
    document = {
        **{"schema": 1, "date": "2026-11-01T10:00:00Z", "cluster": "local", "run_id": run_id, "device": "CPU"},
        **{"device_memory_bytes": None, "torch": "2.13", "cuda": None, "backend": "gloo", "nodes": 1},
        **{"devices_per_node": 1, "hosts": ["h"], "measurements": [{**product, **given, "slowest_seconds": 1.0}]},
    }
    path = place / "state/llmctl/hardware/local.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def test_measured_hardware_takes_the_place_of_the_data_sheet(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "1", "--set", "training.global_batch_size=16")
    before = planned(*words, capsys=capsys)
    hardware(place, "bench-1", 0.2)
    slow = planned(*words, capsys=capsys)
    assert slow["measured"] == "2026-11-01T10:00:00Z" and before["measured"] is None
    assert float(str(slow["iteration_time_s"])) > 2 * float(str(before["iteration_time_s"]))
    assert main(["plan", *words]) == 0
    assert "measured  by llmctl env bench, on 2026-11-01" in capsys.readouterr().out
    assert planned("--uncalibrated", *words, capsys=capsys) == before
    # A fit is for the speeds that were known: after another measurement it does not count.
    measured(place, 1, seconds=3 * float(str(slow["iteration_time_s"])))
    assert main(["plan", "--calibrate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == "bench-1"
    assert planned(*words, capsys=capsys)["calibrated_by"] == 1
    hardware(place, "bench-2", 0.2)
    assert planned(*words, capsys=capsys)["calibrated_by"] == 0


def history_of(*rows: dict[str, float]) -> RunHistory:
    history = RunHistory()
    history.add(parse_columns("".join(json.dumps(each) + "\n" for each in rows).encode(), KEYS))
    return history


def test_the_first_rows_of_each_attempt_are_left_out() -> None:
    times = [9.0, 9.0, 9.0, 1.0, 1.2, 1.1]
    first = [{**row(step, 1, 1e9 + step, 3.0), "iteration_time_s": time} for step, time in enumerate(times, 1)]
    second = [{**row(step, 2, 2e9 + step, 3.0), "iteration_time_s": 9.0} for step in (7, 8, 9)]
    found = steady_step(history_of(*first, *second))
    assert found is not None
    assert (found.seconds, found.rows, found.bytes) == (1.1, 3, 600 << 20)
    assert steady_step(history_of(*first[:5])) is None
    without = [{key: value for key, value in each.items() if key != "peak_memory_bytes"} for each in first]
    unknown = steady_step(history_of(*without))
    assert unknown is not None and unknown.bytes is None
