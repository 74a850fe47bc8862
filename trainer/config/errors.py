"""Error for an invalid training config. Torch-free."""


class ConfigError(ValueError):
    """An invalid value of the training config.

    Attributes:
        key: dotted key of the value, such as ``parallel.tensor_model_parallel_size``; empty if no key can be named.
        problem: one sentence: what is wrong, what is valid, what to do. Names no file, which only the caller knows.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key = key
        self.problem = problem
