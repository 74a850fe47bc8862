"""Section ``logging``: logging and metrics."""

from pydantic import PositiveFloat, PositiveInt

from trainer.config.sections.section import Section


class LoggingConfig(Section):
    """Logging and metrics."""

    log_interval: PositiveInt = 1
    peak_tflops: PositiveFloat | None = None
    """Peak speed of one device in TFLOP/s, for MFU. Unset: looked up for the GPU; unknown GPUs report no MFU."""
