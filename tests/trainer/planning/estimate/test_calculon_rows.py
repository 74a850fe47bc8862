"""The planner on the rows of calculon's own validation, without calculon: the page has calculon's side."""

import re
from pathlib import Path

import pytest

from benchmarks.activation_formulas import FORMS, SHAPES
from benchmarks.calculon.__main__ import row_line, summary_lines
from benchmarks.calculon.validation import ACTIVATIONS, MODES, STATES, TIME, Row, ValidationError, plan_of, rows_of

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "benchmarks/results/calculon.md"
FORM_OF = {
    "none": "tensor",
    "seq": "tensor, sequence",
    "sel": "tensor, selective",
    "seqsel": "tensor, sequence, selective",
    "full": "full",
}
PRINTED = """*Params & Opt,|,none,,,|,seqsel,,,
Model,|,Profile,Calc,Delta,|,Profile,Calc,Delta,
megatron-22B,|,45.5625,40.62,10.84%,|,45.5625,40.62,10.84%,
Ave,,8.49%
,
*Activations,|,none,,,|,seqsel,,,
megatron-1T,|,131.25,131.45,-0.15%,|,26.5625,27.17,-2.30%,
Activations,|,none,,,|,full,,,
gpt3-175B,|,100.0%,100.00%,0.00%,|,8.71%,9.63%,-10.55%,
End-to-end,|,full,,,,|,seqsel,,,,
Model,|,Profile,Calc,Delta,GiB,|,Profile,Calc,Delta,GiB,
turing-530B,|,49.05,49.89,-1.72%,42.27,|,37.83,34.47,8.87%,53.54,
"""


@pytest.fixture(scope="module")
def rows():
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[5].endswith("%"):
            group, error = cells[0].split(",")[0], float(cells[5].rstrip("%")) / 100
            found.append(Row(group, cells[1], cells[2], float(cells[3]), float(cells[4]), error))
    return found


def test_the_page_has_the_predictions_of_today(rows):
    assert [sum(row.group == group for row in rows) for group in (TIME, STATES, ACTIVATIONS, MODES)] == [8, 8, 8, 20]
    page = PAGE.read_text(encoding="utf-8")
    for line in (*summary_lines(rows), *map(row_line, rows)):
        assert line in page, "python -m benchmarks.calculon CHECKOUT --to benchmarks/results/calculon.md"


def test_the_guide_has_the_means_of_the_page(rows):
    errors = [(abs(row.calculon_error), abs(row.ours / row.published - 1)) for row in rows if row.group == TIME]
    calculon, ours = (100 * sum(own) / len(own) for own in zip(*errors, strict=True))
    guide = " ".join((ROOT / "docs/guide/planning.md").read_text(encoding="utf-8").split())
    assert f"of its 8 times the planner misses {ours:.1f}% in the mean, calculon {calculon:.1f}%" in guide


def test_published_memory_is_that_of_the_papers_formulas(rows):
    """As the page says: 18 bytes per parameter, and table 2 for all layers in flight on the first stage."""
    shapes = dict(zip(("megatron-22B", "gpt3-175B", "turing-530B", "megatron-1T"), SHAPES, strict=True))
    forms = {form.name: form for form in FORMS}
    for row in rows:
        shape, plan = shapes[row.model], plan_of(row.model, row.mode)
        layers, pp = plan.config.model.num_layers, len(plan.ranks)
        chunks = plan.schedule.placement.chunks
        own = forms[FORM_OF[row.mode]].paper_bytes(shape)
        if row.group == STATES:
            expected = 18 * 12 * layers * shape.hidden**2 / (8 * pp) / 2**30
            assert row.published == pytest.approx(expected, rel=1e-6)
        elif row.group == ACTIVATIONS:
            in_flight = 1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1
            assert row.published == pytest.approx(layers * own * in_flight / 2**30, rel=1e-6)
        elif row.group == MODES:
            assert row.published == pytest.approx(100 * own / forms["tensor"].paper_bytes(shape), abs=0.2)


def test_the_tables_of_calculon_are_read_with_its_errors():
    found = list(rows_of(PRINTED))
    assert found[0] == Row(STATES, "megatron-22B", "none", 45.5625, 40.62, -0.1084)
    assert found[3] == Row(ACTIVATIONS, "megatron-1T", "seqsel", 26.5625, 27.17, 0.023)
    assert found[5] == Row(MODES, "gpt3-175B", "full", 8.71, 9.63, 0.1055)
    assert found[7] == Row(TIME, "turing-530B", "seqsel", 37.83, 34.47, -0.0887)
    with pytest.raises(ValidationError, match=f"no table of {TIME}"):
        list(rows_of(PRINTED.partition("End-to-end")[0]))
    with pytest.raises(ValidationError, match="not a cell"):
        list(rows_of(re.sub(r"40\.62", "none", PRINTED)))


def test_a_mode_is_a_layout_of_table_5(rows):
    plan = plan_of("turing-530B", "seqsel")
    assert (plan.config.training.recompute_granularity, plan.config.parallel.sequence_parallel) == ("selective", True)
    assert not plan_of("turing-530B", "sel").config.parallel.sequence_parallel
    full = next(row for row in rows if (row.model, row.mode, row.group) == ("megatron-22B", "full", MODES))
    assert full.with_replay > full.ours
    lone = next(row for row in rows if (row.model, row.group) == ("megatron-22B", STATES))
    assert lone.without_embeddings == lone.ours
