"""The pipeline schedule of a run as rows of blocks, for a picture in the page. Pure."""

from typing import Any

from llmctl.operate.comparison.planned import Planned

WIDTH = 1000.0
ROW, BAR = 26, 20
LEFT = 64
_MOST_BLOCKS = 1500
"""Blocks of one picture; of a longer step, its beginning."""
_DIGIT = 7.5
"""Width of a digit of a label, with some room."""
_MOST_RANKS = 32


def timeline_of(planned: Planned) -> dict[str, Any] | None:
    """The picture of a step as the schedule's table plays it; None without a pipeline."""
    from trainer.planning.schedule.draw import NAMES, Drawing, DrawingError

    plan = planned.plan
    stages = len(plan.schedule.stages)
    if stages < 2:
        return None
    try:
        drawing = Drawing(plan.schedule, plan.step.times, "timeline")
    except DrawingError:
        return None
    step = plan.step.times.step_time
    until = _until(drawing, step)
    scale = WIDTH / until
    rows = []
    for rank in range(min(stages, _MOST_RANKS)):
        blocks = []
        for action, start, end in drawing.blocks(rank):
            if start >= until:
                break
            width = (min(end, until) - start) * scale
            label = str(action.micro_batch)
            blocks.append(
                {
                    "x": f"{LEFT + start * scale:.1f}",
                    "width": f"{max(0.4, width - 1):.1f}",
                    "middle": f"{LEFT + start * scale + width / 2:.1f}",
                    "kind": action.kind.name.lower().replace("_", "-"),
                    "later": action.chunk > 0,
                    "label": label if width >= _DIGIT * len(label) + 4 else "",
                }
            )
        rows.append({"rank": rank, "y": ROW * rank, "blocks": blocks})
    kinds = [{"kind": kind.name.lower().replace("_", "-"), "words": NAMES[kind]} for kind in drawing.kinds]
    return {
        "rows": rows,
        "width": f"{LEFT + WIDTH:.0f}",
        "height": ROW * len(rows),
        "bar": BAR,
        "left": LEFT,
        "kinds": kinds,
        "has_chunks": plan.schedule.placement.chunks > 1,
        "summary": _summary(planned, step, until),
    }


def _until(drawing: Any, step: float) -> float:
    """The time up to which at most so many blocks begin."""
    starts = sorted(start for rank in range(len(drawing.times.rows)) for _, start, _ in drawing.blocks(rank))
    return starts[_MOST_BLOCKS] if len(starts) > _MOST_BLOCKS else step


def _summary(planned: Planned, step: float, until: float) -> str:
    plan = planned.plan
    count = plan.schedule.num_micro_batches
    words = (
        f"{len(plan.schedule.stages)} pipeline ranks, {count} micro-batch{'es' * (count > 1)}; of a step of "
        f"{step:.3g} s, {100 * plan.step.times.bubble_fraction:.1f}% is spent waiting"
    )
    shown = "" if until >= step else f"; shown is the first {100 * until / step:.2g}% of the step"
    ranks = len(plan.schedule.stages)
    return words + shown + (f"; the first {_MOST_RANKS} ranks" if ranks > _MOST_RANKS else "")
