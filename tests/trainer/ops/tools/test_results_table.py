"""The tables of docs/guide/benchmarks.md are what the results of benchmarks/ give."""

import json
import shutil

import pytest

from benchmarks.results_table import BEGIN, END, PAGE, RESULTS, main, stored_results, tables
from trainer.planning.kernel_choice import ROWS

ROW = {
    **{"device": "cpu", "dtype": "float32", "operation": "rms_norm", "size": "4096x4096", "backend": "native"},
    **{"is_chosen": True, "seconds": 0.02, "gb_per_s": 16.8, "of_copy": 0.61, "of_reference": 2.0, "of_plain": 4.16},
    "problem": "",
}
DOCUMENT = {
    **{"date": "2026-11-20", "torch": "2.13.0", "cuda": None, "driver": None, "compiler": "g++ 12", "threads": 1},
    **{"devices": {"cpu": "a processor"}, "copy_gb_per_s": {"cpu": 27.3}, "training": None},
    "measurements": [
        ROW,
        {**ROW, "dtype": "bfloat16", "of_plain": 7.0},
        {**ROW, "backend": "reference", "is_chosen": False},
        {**ROW, "size": "64x256", "seconds": 1e-5},
        {**ROW, "operation": "layer_norm", "backend": "reference", "of_plain": 1.0},
    ],
}
ON_GPU = {
    **DOCUMENT,
    **{"date": "2026-11-19", "cuda": "13.0", "driver": "580.95.05", "devices": {"cuda": "NVIDIA H200"}},
    **{"copy_gb_per_s": {"cuda": 4300.0}, "measurements": [{**ROW, "device": "cuda", "of_copy": 0.85}]},
}


@pytest.fixture
def place(tmp_path):
    """Flags for a page and results of a test's own; and the page."""
    page, results = tmp_path / "benchmarks.md", tmp_path / "results"
    results.mkdir()
    page.write_text(f"# A tool\n\n{BEGIN}\n{END}\n\n## More\n")
    (results / "kernels-2026-11-20.json").write_text(json.dumps(DOCUMENT))
    return [f"--page={page}", f"--results={results}"], page


def test_the_page_matches_the_results():
    assert main(["--check"]) == 0, "python -m benchmarks.results_table writes it"


def test_every_operation_is_in_the_page():
    """Results of a part of them would stand there alone."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert [name for name in ROWS if f"\n| {name} | " not in table] == []


def test_every_result_can_be_read_by_people_and_by_programs():
    texts, documents = ({path.stem for path in RESULTS.glob(f"kernels-*.{kind}")} for kind in ("md", "json"))
    assert texts == documents


@pytest.mark.parametrize(("old", "new"), [("\n| rope |", "\n| ropes |"), (f"{END}\n", "")])
def test_a_manual_change_is_detected(tmp_path, capsys, old, new):
    page = tmp_path / "benchmarks.md"
    text = PAGE.read_text()
    assert old in text
    page.write_text(text.replace(old, new, 1))
    assert main(["--check", f"--page={page}"]) == 1
    assert str(page) in capsys.readouterr().err


def test_the_tables_are_written_between_two_lines(place):
    flags, page = place
    assert main(["--check", *flags]) == 1
    assert main(flags) == main(["--check", *flags]) == 0
    lines = page.read_text().splitlines()
    assert lines[0] == "# A tool" and lines[-1] == "## More"
    assert [line for line in lines if line.startswith("| ")] == [
        "| operation | size | float32 | bfloat16 |",
        "| --- | --- | --- | --- |",
        "| rms_norm | 4096x4096 | native 4.2x, 61% | native 7.0x, 61% |",
        "| layer_norm | 4096x4096 | reference 1.0x, 61% |  |",
    ]
    assert "This table is of CPUs." in lines


def test_results_of_gpus_are_shown_when_there_are_any():
    newer = {**DOCUMENT, "date": "2026-11-21", "measurements": [{**ROW, "of_plain": 9.9}]}
    text = "\n".join(tables([newer, DOCUMENT, ON_GPU]))
    assert "native 9.9x" in text and "native 7.0x" not in text
    assert "NVIDIA H200, CUDA 13.0, driver 580.95.05, 2026-11-19" in text and "native 4.2x, 85%" in text
    assert "No GPU" not in text


def test_measurements_without_backward_have_separate_rows():
    lines = tables([{**DOCUMENT, "forward": [{**ROW, "of_plain": 6.3}, {**ROW, "is_chosen": False, "of_plain": 0.5}]}])
    assert "| rms_norm | 4096x4096 | native 4.2x, 61% | native 7.0x, 61% |" in lines
    assert "| rms_norm, forward | 4096x4096 | native 6.3x, 61% |  |" in lines


def test_the_newest_result_of_training_is_shown():
    trainers = {"ours": {"tokens_per_s": 1306.4, "of_matmul_speed": 0.969, "peak_mib": 1474.0}}
    training = {"model": "small", "rounds": 3, "steps": 4, "matmul_gflops_per_s": 86.9, "trainers": trainers}
    text = "\n".join(tables([DOCUMENT, {**DOCUMENT, "training": training}]))
    assert "| ours | 1,306 | 96.9% | 1,474 |" in text


def test_the_newest_comes_first(tmp_path):
    for day in ("2026-11-20", "2026-12-01", "2026-11-21"):
        (tmp_path / f"kernels-{day}.json").write_text(json.dumps({**DOCUMENT, "date": day}))
    assert [document["date"] for document in stored_results(tmp_path)] == ["2026-12-01", "2026-11-21", "2026-11-20"]


def test_without_results_nothing_is_written(place, capsys):
    flags, page = place
    before = page.read_text()
    shutil.rmtree(page.parent / "results")
    assert main(flags) == 1 and page.read_text() == before
    assert "run python -m benchmarks.kernels --write" in capsys.readouterr().err
