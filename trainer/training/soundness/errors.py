"""The root of the errors by which checks end a run."""


class SoundnessError(RuntimeError):
    """Steps or weights are not sound. The message has the whole cause: no traceback helps."""
