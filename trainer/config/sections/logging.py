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
    log_params_norm: bool = False
    """Rows have ``params_norm``, the norm of all parameters: of the float32 masters where weights have 16 bits."""
    log_num_zeros_in_grad: bool = False
    """Rows have ``num_zeros_in_grad``, the number of elements of the gradient that are exactly 0."""
    log_layer_norms: bool = False
    """Rows have ``layer_params_norms`` and ``layer_grad_norms``, the norms of parameters and gradient of each layer."""
    moe_per_layer_logging: bool = False
    """Rows have ``moe_layers``: of each layer with experts the auxiliary losses and the load of the experts."""
    numbers_interval: PositiveInt | None = None
    """Iterations between rows with the requested numbers; a multiple of log_interval. Unset: every row."""
