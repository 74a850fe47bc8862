"""Error of this room. Torch-free."""


class EvaluationError(ValueError):
    """A task, model or text that cannot be evaluated. The message is one sentence."""
