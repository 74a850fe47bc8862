"""benchmarks.gpu.stages keeps what ended, goes on where a visit was cut off, and runs on the CPU at toy size."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import stages
from benchmarks.gpu.stages import STAGES, Results, Stage, items_of, run, summary


def stage(name: str, script: str, limit_s: int = 60) -> Stage:
    argv = (sys.executable, "-c", script)
    return Stage(name, argv, argv, limit_s)


def visit(monkeypatch: pytest.MonkeyPatch, folder: Path, *chosen: Stage, words: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr(stages, "STAGES", chosen)
    monkeypatch.setattr(sys, "argv", ["stages", "--out", str(folder), *words])
    return stages.main()


def test_a_visit_goes_on_after_the_stages_that_ended_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = stage("good", "print('{\"tokens\": 5}'); open('/dev/null')")
    bad = stage("bad", "import sys; print('{\"half\": 1}'); sys.exit('the cause')")
    assert visit(monkeypatch, tmp_path, good, bad) == 1
    assert visit(monkeypatch, tmp_path, stage("good", "raise SystemExit('ran twice')"), stage("bad", "print(1)")) == 0
    rows = Results(tmp_path).read()
    assert [(row["stage"], row["exit"]) for row in rows if "exit" in row] == [("good", 0), ("bad", 1), ("bad", 0)]
    assert [row["item"] for row in rows if "item" in row] == [{"tokens": 5}, {"half": 1}]
    assert "| bad | 1 |" in (tmp_path / "summary.md").read_text() and "the cause" in (tmp_path / "log.txt").read_text()


def test_a_stage_ends_at_its_limit_with_what_it_told(tmp_path: Path) -> None:
    endless = stage("endless", "import time; print('{\"told\": 1}', flush=True); time.sleep(10000)")
    results = Results(tmp_path)
    assert run(endless, endless.argv, 5, results) == 124
    told, end = results.read()
    assert told["item"] == {"told": 1} and end["exit"] == 124


def test_no_stage_starts_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visit(monkeypatch, tmp_path, stage("late", "raise SystemExit(1)"), words=("--seconds", "5")) == 0
    assert Results(tmp_path).read() == []


def test_unknown_stages_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        visit(monkeypatch, tmp_path, stage("a", ""), words=("b",))


def test_objects_are_read_from_lines_and_from_whole_documents() -> None:
    assert items_of('words\n{"a": 1}\n{"b": 2}\n') == [{"a": 1}, {"b": 2}]
    assert items_of(json.dumps({"a": [1]}, indent=1)) == [{"a": [1]}]


def test_the_summary_has_the_speeds() -> None:
    item = {"model": "1b", "trainer": "ours", "tokens_per_s": 1234.5, "tflops": 9.0, "mfu_full": 0.5, "mfu_causal": 0.4}
    item |= {"micro_batches": 8, "micro_batch": 4, "sequence": 4096, "peak_gib": 10.0}
    assert "| 1b, 8 x 4 x 4096 | ours | 1,234 | 9.0 | 50.0% / 40.0% | 10.0 |" in summary([{"stage": "s", "item": item}])


# One of those that train with this trainer runs in make test: its parts change most.
OFTEN = ("345m-ours",)


@pytest.mark.parametrize(
    "chosen",
    [pytest.param(one, id=one.name, marks=() if one.name in OFTEN else pytest.mark.proof) for one in STAGES if one.dry],
)
def test_every_stage_runs_on_the_cpu(chosen: Stage, tmp_path: Path) -> None:
    assert chosen.dry is not None
    assert run(chosen, chosen.dry, 3600, Results(tmp_path)) == 0, (tmp_path / "log.txt").read_text()
