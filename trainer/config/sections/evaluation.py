"""Section ``evaluation``: tasks that are evaluated while training."""

from pydantic import PositiveInt

from trainer.config.sections.section import Section


class EvaluationConfig(Section):
    """Tasks of lm-evaluation-harness that are evaluated while training, with results in metrics.jsonl."""

    tasks: list[str] = []
    """Names of tasks, and .yaml files of your own. Their data must be on this machine."""
    every: PositiveInt | None = None
    """Iterations between evaluations. Unset: only at the end of the training."""
    limit: PositiveInt | None = None
    """Evaluate only the first N items of each task. Unset: all."""
