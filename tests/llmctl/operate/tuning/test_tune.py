"""``llmctl tune`` on cluster local: a real contest, its results, and what is refused before any job."""

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError
from llmctl.operate.tuning import run as tuning_run
from llmctl.operate.tuning.drawing import svg_of
from llmctl.operate.tuning.plan import FILE, OWN
from llmctl.operate.tuning.results import TuneRow, read_results
from tests.llmctl.run_directories import TRANSPORT, make_run

CONFIG = {
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "attention_dropout": 0.0,
    },
    "training": {"train_iters": 100, "seq_length": 32, "global_batch_size": 4, "kernel_backend": "reference"},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}
SESSION = ClusterSession(cast("Any", None), TRANSPORT, None)
WORDS = ("tune", "c.yaml", "--nodes", "2", "--layouts", "1", "--steps", "1")


@pytest.fixture
def place(home: Path) -> Path:
    (home / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    return home


def runs_of(place: Path) -> list[str]:
    folder = place / "runs"
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".") if folder.exists() else []


def test_a_contest_ends_with_a_config_that_trains(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--output", "best.yaml", "--svg", "t.svg", "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert "round 1: " in shown.err and "the fastest: " in shown.err
    assert len(document["rows"]) == 2 and all(row["iteration_time_s"] for row in document["rows"])
    assert OWN in [row["layout"] for row in document["rows"]]
    best = yaml.safe_load((place / "best.yaml").read_text())
    # The values of the short runs are not in it.
    assert best["training"]["train_iters"] == 100 and best["job"] == {"nodes": 2}
    assert main(["submit", "best.yaml", "--dry-run"]) == 0
    assert (place / "t.svg").read_text().startswith("<svg")
    capsys.readouterr()
    # Again it only shows the table.
    before = runs_of(place)
    assert main([*WORDS]) == 0
    shown = capsys.readouterr()
    assert "has ended; --again starts a new run" in shown.err and runs_of(place) == before
    assert [line.split()[-1] for line in shown.out.splitlines()][0] == "LAYOUT"


def test_a_dry_run_shows_the_layouts_and_submits_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].split() == ["STEP", "S", "GIB", "LAYOUT"]
    assert "nothing was submitted" in shown.err and runs_of(place) == []
    unset = {**CONFIG, "training": {**CONFIG["training"], "global_batch_size": None}}
    (place / "c.yaml").write_text(yaml.safe_dump(unset))
    assert main([*WORDS, "--dry-run"]) == 0
    assert "training.global_batch_size: is unset; all layouts have 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--points", "5"), "--points: local names no rate"),
        (("--points", "5", "--minutes", "9"), "takes the place of --minutes"),
        (("--output", "nowhere/b.yaml"), "--output nowhere/b.yaml: cannot be written"),
        (("--svg", "nowhere/b.svg"), "--svg nowhere/b.svg: cannot be written"),
        (("--set", "model.hidden_size=63"), "model.hidden_size"),
        (("--set", "model.multi_latent_attention=true", "--set", "model.mtp_num_layers=1"), "model."),
        (("--minutes", "0"), "--minutes"),
    ],
)
def test_bad_input_is_told_before_any_job(
    place: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *words]) in (2, 3)
    assert said in capsys.readouterr().err and runs_of(place) == []


def results_of(root: Path, rows: list[dict[str, Any]]) -> Any:
    run = make_run(root, train_iters=None)
    candidates = [
        {"name": f"layout {number}", "settings": {"training.micro_batch_size": 1}, "seconds": 1.0 + number, "bytes": 9}
        for number in range(4)
    ]
    given = {"config": CONFIG, "own": CONFIG, "nodes": 2, "ranks_per_node": 1, "steps": 2, "candidates": candidates}
    (run.path / FILE).write_text(json.dumps(given))
    (run.path / "tune.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"candidate": 3, "rou')
    return read_results(run.record, SESSION)


def result(candidate: int, number: int, seconds: float | None, outcome: str = "ok", reason: str = "") -> dict[str, Any]:
    return {
        "candidate": candidate,
        "round": number,
        "outcome": outcome,
        "seconds": seconds,
        "bytes": None,
        "reason": reason,
    }


def test_rows_are_in_the_order_of_the_contest(tmp_path: Path) -> None:
    rows = [
        result(0, 0, None, "out_of_memory", "CUDA out of memory"),
        result(1, 0, 3.0),
        result(2, 0, 1.0),
        result(2, 1, 2.0),
    ]
    found = results_of(tmp_path, rows)
    shown = found.document["rows"]
    assert [row["layout"] for row in shown] == ["layout 2", "layout 1", "layout 0", "layout 3"]
    assert [row["outcome"] for row in shown] == ["ok", "ok", "out_of_memory", None]
    assert (shown[0]["rounds"], shown[0]["iteration_time_s"], shown[0]["tokens_per_s"]) == (2, 2.0, 4 * 32 / 2.0)
    best = found.best_config()
    assert best["training"]["micro_batch_size"] == 1 and best["job"] == {"nodes": 2}


def test_nothing_that_ran_gives_no_config(tmp_path: Path) -> None:
    assert results_of(tmp_path, [result(0, 0, None, "failed", "x")]).best_config() is None


def test_a_run_of_another_command_is_told(tmp_path: Path) -> None:
    found = results_of(tmp_path, [])
    record = make_run(tmp_path, "other-261121-120000-abcd").record
    with pytest.raises(RecordError, match="does not come from llmctl tune"):
        read_results(record, SESSION)
    assert found.document["rows"][0]["outcome"] is None


def test_a_run_that_was_asked_for_something_else_is_not_taken_up(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of the same name, with another config."""
    submitted = []

    def refuse(*_: object) -> None:
        submitted.append(1)
        raise RecordError("stopped here")

    monkeypatch.setattr(tuning_run, "execute_plan", refuse)
    run = make_run(place / "runs", "tune-c-261121-120000-abcd", train_iters=None)
    (run.path / FILE).write_text(json.dumps({"config": {}, "nodes": 2, "ranks_per_node": 1, "steps": 1}))
    Context.of((), (), os.environ).index.add(run.record)
    assert main([*WORDS]) == 5
    assert submitted == [1] and "stopped here" in capsys.readouterr().err


def test_the_picture_escapes_names_and_marks_what_did_not_run() -> None:
    row: TuneRow = {
        "layout": "<b>& tp 1",
        "settings": {},
        "outcome": "ok",
        "rounds": 1,
        "iteration_time_s": 2.0,
        "tokens_per_s": 100.0,
        "peak_memory_bytes": None,
        "predicted_iteration_time_s": 1.0,
        "predicted_peak_memory_bytes": 1,
        "reason": "",
    }
    lost: TuneRow = {**row, "outcome": "out_of_memory", "tokens_per_s": None, "iteration_time_s": None}
    text = svg_of("a <title>", [row, lost, {**lost, "outcome": None}])
    assert "<b>" not in text and "&lt;b&gt;&amp; tp 1" in text and "a &lt;title&gt;" in text
    assert "out of memory" in text and "not tried" in text
    # The bar of the measured half of what was predicted.
    assert text.count("<rect") == 2 + 1 + 1
