"""Recorded CPU layouts beside today's predictions, and a small run of the measurement itself."""

import time
from pathlib import Path
from statistics import median

import pytest

from benchmarks.cpu_layouts.layouts import LAYOUTS, PROCESSES, STEPS
from benchmarks.cpu_layouts.measure import WARM_UP, MeasurementError, Ranks, train
from benchmarks.cpu_layouts.page import row_lines
from benchmarks.cpu_layouts.records import judged, read_records

RESULTS = Path(__file__).parents[4] / "benchmarks/results"
MEMORY, CPU_SECONDS = 0.05, 0.1
"""Median errors."""


@pytest.fixture(scope="module")
def rows():
    return judged(read_records(RESULTS / "cpu_layouts.jsonl"))


def test_every_layout_was_measured(rows):
    assert [row.layout for row in rows] == list(LAYOUTS)
    assert {row.layout.ranks for row in rows} == {1, 2, 4}


def test_the_page_has_the_predictions_of_today(rows):
    page = (RESULTS / "cpu_layouts.md").read_text(encoding="utf-8")
    for line in row_lines([row for row in rows if row.layout.model != "MoE"]):
        assert line in page, "python -m benchmarks.cpu_layouts benchmarks/results/cpu_layouts.jsonl --to PAGE"


def test_errors_are_within_their_bounds(rows):
    assert median(abs(row.memory_error) for row in rows) <= MEMORY
    assert median(abs(row.cpu_error) for row in rows) <= CPU_SECONDS


def test_each_layout_is_a_config_with_a_place_for_every_rank():
    for layout in LAYOUTS:
        pp = layout.config.parallel.pipeline_model_parallel_size
        assert [layout.pipeline_rank(rank) for rank in range(layout.ranks)] == [
            stage for stage in range(pp) for _ in range(layout.ranks // pp)
        ]


def test_two_ranks_are_trained_and_measured():
    found = train(PROCESSES[1])
    assert len(found["seconds"]) == STEPS - WARM_UP
    assert len(found["cpu"]) == len(found["peaks"]) == 2
    assert min(found["peaks"]) > 100 * 2**20


def test_a_rank_that_fails_is_told(tmp_path):
    with Ranks(["pretrain", "--config", "nowhere.yaml"], 1, tmp_path) as ranks, pytest.raises(MeasurementError):
        while not ranks.is_done():
            time.sleep(0.1)


def test_the_guide_has_the_medians_of_the_page():
    page = (RESULTS / "cpu_layouts.md").read_text(encoding="utf-8")
    cells = next(line for line in page.splitlines() if line.startswith("| all |")).split(" | ")
    guide = " ".join((RESULTS.parents[1] / "docs/guide/planning.md").read_text(encoding="utf-8").split())
    assert f"{cells[2]} of memory in the median, and {cells[7]} of CPU seconds" in guide
