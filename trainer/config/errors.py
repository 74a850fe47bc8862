"""The one error that a training config is refused with. Torch-free."""


class ConfigError(ValueError):
    """A value of the training config that cannot be used.

    Attributes:
        key: dotted key of the culprit, as in ``parallel.tensor_model_parallel_size``; empty if none can be named.
        problem: one sentence: what is wrong, what is valid, what to do. Names no file: the caller knows it.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key = key
        self.problem = problem
