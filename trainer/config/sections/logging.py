"""Section ``logging``: logging and metrics."""

from pydantic import PositiveFloat, PositiveInt

from trainer.config.sections.section import Section


class LoggingConfig(Section):
    """Logging and metrics."""

    log_interval: PositiveInt = 1
    """Iterations per log line and row of metrics.jsonl. The last iteration of a run is always logged."""
    peak_tflops: PositiveFloat | None = None
    """Peak speed of one device in TFLOP/s, for MFU. Unset: looked up for the GPU; unknown GPUs report no MFU."""
