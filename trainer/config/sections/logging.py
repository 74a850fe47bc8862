"""Section ``logging``: logging and metrics."""

from pydantic import PositiveFloat, PositiveInt

from trainer.config.sections.section import Section


class LoggingConfig(Section):
    """Logging and metrics."""

    log_interval: PositiveInt | None = None
    """Iterations per log line and row of metrics.jsonl. Unset: a row per iteration, and after the first five lines at
    most one line per 10 s. The last iteration of a run is always logged."""
    peak_tflops: PositiveFloat | None = None
    """Peak speed of one device in TFLOP/s, for MFU. Unset: looked up for the GPU; unknown GPUs report no MFU."""
