"""Bytes of a layer beside Korthikanti et al. 2022 (arXiv:2205.05198), table 2, term by term."""

from pathlib import Path

import pytest

from benchmarks.activation_formulas import FORMS, LENGTH, SHAPES, Form, Shape, form_lines, term_lines

GUIDE = Path(__file__).parents[4] / "docs/guide/planning.md"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_layer_keeps_what_the_paper_counts_but_for_known_terms(form: Form, shape: Shape) -> None:
    ranks = shape.tp if form.is_parallel else 1
    stream = 2 * shape.unit / (ranks if form.is_sequence_parallel else 1)
    if form.training.get("recompute_granularity") == "full":
        expected = stream
    else:
        # No masks of hidden dropout, a byte each for two of them; the result of attention once more, in the order of
        # heads; a float32 for each token and norm.
        in_order_of_heads = form.has_scores * 2 * shape.unit / ranks
        expected = form.paper_bytes(shape) - stream + in_order_of_heads + 8 * shape.samples * LENGTH
    assert form.predicted_bytes(shape) == pytest.approx(expected)


def test_the_paper_is_as_printed() -> None:
    """Section 4.1: of 175B 5 a s / h is 80, of 530B 64, and selective recompute saves 70% and 65%."""
    small, large = SHAPES[1:3]
    assert (small.scores, large.scores) == (80, 64)
    assert [round(shape.scores / (34 + shape.scores), 2) for shape in (small, large)] == [0.70, 0.65]


def test_the_guide_has_the_tables_of_today() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for line in (*term_lines(), *form_lines()):
        assert line in guide, "python -m benchmarks.activation_formulas"
