"""Speed, efficiency and the error of the prediction, and the picture of them."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from llmctl.job_state import JobState
from llmctl.operate.scale.drawing import chart_of, lines_of, svg_of
from llmctl.operate.scale.kept import Scaling, ScalingFiles, SizeRun
from llmctl.operate.scale.table import SizeState, document_of, rows_of


def size(nodes, step_s, predicted_s=None, *, state=JobState.COMPLETED, detail=""):
    run = SizeRun(f"a-{nodes}n-1", nodes, 8 * nodes, 64, 64_000, predicted_s, 0.5 * nodes, None)
    return SizeState(run, state, detail, step_s)


def column(sizes, key):
    return [row[key] for row in rows_of(sizes)]


def test_numbers_of_two_sizes():
    sizes = [size(1, 8.0, 6.0), size(2, 5.0, 3.0)]
    assert column(sizes, "tokens_per_s") == [8000, 12800]
    assert column(sizes, "tokens_per_s_per_device") == [1000, 800]
    assert column(sizes, "efficiency") == [1.0, 0.8]
    assert column(sizes, "predicted_efficiency") == [1.0, 1.0]
    assert column(sizes, "prediction_error") == pytest.approx([-0.25, -0.4])


def test_a_size_that_failed_has_no_numbers_and_the_next_one_is_the_first():
    sizes = [size(1, None, state=JobState.FAILED, detail="rank 0"), size(2, 5.0), size(4, 4.0)]
    assert column(sizes, "efficiency") == [None, 1.0, 0.625]
    assert column(sizes, "prediction_error") == [None] * 3
    assert sizes[0].has_failed and not sizes[1].has_failed
    assert (sizes[0].summary, size(1, None, state=JobState.CANCELLED, detail="cancelled by you").summary) == (
        *("failed: rank 0", "cancelled by you"),
    )


def test_a_size_that_was_not_submitted_has_no_run():
    (row,) = rows_of([replace(size(2, None), state=None)])
    assert (row["run_id"], row["state"], row["tokens_per_s"]) == (None, None, None)


def test_the_document_has_the_sum_of_the_cost():
    scaling = Scaling("a", "lab", True, 20, {}, "points")
    unlimited = size(4, 3.0)
    unlimited = replace(unlimited, run=replace(unlimited.run, node_hours=None))
    assert document_of(scaling, [size(1, 8.0), unlimited])["node_hours"] is None
    found = document_of(scaling, [size(1, 8.0), size(2, 5.0)])
    assert (found["node_hours"], found["points"], found["unit"]) == (1.5, None, None)
    assert (found["name"], found["weak"], found["steps"], len(found["rows"])) == ("a", True, 20, 2)


def test_the_ideal_begins_at_the_smallest_measured_size():
    found = lines_of(rows_of([size(1, None, 4.0), size(2, 5.0, 2.0), size(8, 2.0, 1.0)]))
    assert found["measured"] == [(2, 12800), (8, 32000)] and found["ideal"] == [(2, 12800), (8, 51200)]
    assert [nodes for nodes, _ in found["predicted"]] == [1, 2, 8]
    # Before anything is measured, at the smallest predicted one.
    assert lines_of(rows_of([size(1, None, 4.0), size(2, None, 2.0)]))["ideal"] == [(1, 16000), (2, 32000)]


def test_a_plot_needs_two_points():
    assert chart_of(rows_of([size(1, 8.0)])) is None
    chart = chart_of(rows_of([size(1, 8.0), size(2, 5.0)]))
    assert chart is not None and [line.name for line in chart.lines] == ["measured", "ideal"]


def points_of(picture, number):
    lines = re.findall(r'<polyline points="([^"]*)"', picture)
    return [tuple(map(float, point.split(","))) for point in lines[number].split()]


def test_both_axes_of_the_picture_are_logarithmic():
    """Twice the nodes, or twice the speed, are everywhere the same distance."""
    picture = svg_of("a & b", rows_of([size(1, 8.0), size(2, 4.0), size(4, 2.0)]))
    ElementTree.fromstring(picture)
    (x1, y1), (x2, y2), (x3, y3) = points_of(picture, 0)
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert x2 > x1 and y2 < y1
    # What scales ideally lies on the ideal line.
    assert points_of(picture, 0) == points_of(picture, 1)


@pytest.mark.parametrize("sizes", [[], [size(1, None, state=None)], [size(4, 2.0)]])
def test_a_picture_of_few_numbers_is_valid(sizes):
    ElementTree.fromstring(svg_of("a", rows_of(sizes)))


def test_a_scaling_is_kept_and_found_by_name(tmp_path):
    files = ScalingFiles(tmp_path)
    scaling = Scaling("a", "lab", False, 20, {"training.seq_length": 8}, "points").with_run(size(2, None).run)
    assert files.find("a") is None and files.names() == []
    files.save(scaling)
    assert files.find("a") == scaling and files.names() == ["a"]
    assert files.find("../scaling/a") is None
    assert [run.nodes for run in scaling.with_run(size(1, None).run).runs] == [1, 2]
    assert len(scaling.with_run(replace(size(2, None).run, run_id="b")).runs) == 1
