"""Error of this room. Torch-free."""


class GenerationError(ValueError):
    """A model, prompt or setting that cannot be used. The message is one sentence."""
