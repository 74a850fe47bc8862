"""The fields of the rows of metrics.jsonl: unit, row and meaning of each. Torch-free.

docs/reference/metrics.md and the schema of ``llmctl schema metrics`` are made of this table.
"""

from typing import Any, NamedTuple

_Number = float | None
_ByName = dict[str, _Number]


class RowField(NamedTuple):
    """A field of a row.

    Attributes:
        unit: of its number; empty for a pure number.
        when: the rows that have it.
        meaning: in words.
        kind: type of the value.
    """

    unit: str
    when: str
    meaning: str
    kind: Any = _Number


_EVERY, _TRAINING, _VALIDATION = "every row", "training", "validation"
_MOE = "training, with experts and this loss"

FIELDS: dict[str, RowField] = {
    "attempt": RowField("", _EVERY, "The attempt that wrote the row, from 1 on.", int),
    "fencing_token": RowField(
        "",
        "every row of a run of llmctl",
        "The number of the attempt's lock. A row with a lower token than a row before it is from an attempt that "
        "had lost the run, and does not count.",
        int,
    ),
    "iteration": RowField("", _EVERY, "The last iteration that the row is about.", int),
    "time": RowField("s", _EVERY, "The time of the row, in seconds since 1970.", float),
    "consumed_samples": RowField("samples", _TRAINING, "Samples since the start of the run.", int),
    "consumed_tokens": RowField("tokens", _TRAINING, "Positions since the start of the run.", int),
    "lm_loss": RowField(
        "nats per token",
        _TRAINING,
        "The sum over the valid tokens of the global batch, divided once by their number, alike in every layout. "
        "Null without a valid token.",
    ),
    "sop_loss": RowField(
        "nats per sample",
        "training of BERT",
        "The loss of the order of a sample's two parts. BERT minimises the sum of both losses.",
    ),
    "mtp_1_loss": RowField(
        "nats per token",
        "training with `model.mtp_num_layers`",
        "The loss of the first depth of multi-token prediction; `mtp_2_loss` and so on of the others. `lm_loss` "
        "does not contain them.",
    ),
    "load_balancing_loss": RowField(
        "",
        _MOE,
        "The loss that balances the load of the experts, without its coefficient, as Megatron-LM logs it: the "
        "mean over micro-batches, replicas and layers with experts. `lm_loss` does not contain it.",
    ),
    "z_loss": RowField(
        "",
        _MOE,
        "The z-loss of the routers, without its coefficient, as Megatron-LM logs it: the mean over micro-batches, "
        "replicas and layers with experts. `lm_loss` does not contain it.",
    ),
    "grad_norm": RowField(
        "",
        _TRAINING,
        "Norm of the gradient of the whole model before clipping. Each parameter counts once.",
    ),
    "learning_rate": RowField("", _TRAINING, "The learning rate of all weights."),
    "loss_scale": RowField("", _TRAINING, "The loss scale of fp16; 1 without fp16."),
    "iteration_time_s": RowField("s", _TRAINING, "Time of an iteration, the mean since the row before."),
    "tokens_per_s": RowField(
        "tokens/s",
        _TRAINING,
        "Positions of the global batch per second, summed over all ranks.",
    ),
    "tflops_per_device": RowField(
        "TFLOP/s",
        _TRAINING,
        "Model FLOPs of one device: (6 N + 12 l h s) operations per token. N counts the parameters without the "
        "input embedding and without vocabulary padding. The output layer counts even if it is tied. Of the "
        "experts, only those that a token is sent to count. l is the number of layers, h the attention width, s "
        "the sequence length. There is no discount for causal attention, and recomputation does not count.",
    ),
    "mfu": RowField(
        "",
        _TRAINING,
        "`tflops_per_device` divided by the dense 16-bit peak of the GPU, or by `logging.peak_tflops`. Null if "
        "neither is known.",
    ),
    "peak_memory_bytes": RowField(
        "bytes", _TRAINING, "Peak memory: allocated on a GPU, resident on the CPU. The largest value of any rank.", int
    ),
    "skipped_iterations": RowField(
        "", _TRAINING, "fp16 steps of the run that were skipped because the loss scale was too high.", int
    ),
    "nan_iterations": RowField(
        "", _TRAINING, "fp32 and bf16 steps of the run that were skipped because loss or gradient was not finite.", int
    ),
    "params_norm": RowField(
        "",
        "`logging.log_params_norm`",
        "Norm of all parameters after the step, of the float32 masters where weights have 16 bits.",
    ),
    "num_zeros_in_grad": RowField(
        "",
        "`logging.log_num_zeros_in_grad`",
        "Elements of the gradient that are exactly 0, without vocabulary padding.",
        int,
    ),
    "layer_params_norms": RowField(
        "",
        "`logging.log_layer_norms`",
        'Norm of each layer\'s parameters, as in `{"embedding": 1.7, "layers.0": 4.2}`.',
        _ByName,
    ),
    "layer_grad_norms": RowField(
        "",
        "`logging.log_layer_norms`",
        "Norm of each layer's gradient before clipping. A norm that is not finite is null, and so shows the layer "
        "of an overflow.",
        _ByName,
    ),
    "moe_layers": RowField(
        "",
        "`logging.moe_per_layer_logging`",
        "Of each layer with experts, in this iteration, its auxiliary losses; `load_max_over_mean`, the tokens of "
        "the busiest expert over the mean, 1 if all have the same; and `load_entropy`, 1 if all have the same, 0 "
        "if one has all. Tokens count before any is dropped.",
        dict[str, _ByName],
    ),
    "memory_allocated_bytes": RowField(
        "bytes",
        "`logging.log_memory`",
        "Memory in use now, allocated on a GPU, resident on the CPU. The largest value of any rank.",
        int,
    ),
    "memory_reserved_bytes": RowField(
        "bytes",
        "`logging.log_memory`, on a GPU",
        "Memory that torch's allocator holds. The largest value of any rank.",
        int,
    ),
    "device_memory_used_bytes": RowField(
        "bytes",
        "`logging.log_memory`, on a GPU",
        "Memory of the GPU that all processes use. The largest value of any rank.",
        int,
    ),
    "batch_size": RowField("samples", "`logging.log_batch_size`", "Samples of a global batch.", int),
    "world_size": RowField("ranks", "`logging.log_world_size`", "Number of ranks.", int),
    "timers_s": RowField(
        "s",
        "`logging.timing_log_level`",
        'Seconds per iteration, over the logged interval, of each part of a step, as in `{"data": {"min": 0.01, '
        '"max": 0.02}}` of the fastest and the slowest rank. Level 1: `data`, `forward_backward`, `gradient_sync` '
        "and `optimizer`; level 2 also `forward_compute`, `backward_compute` and `pipeline_communication`. "
        "`logging.timing_log_option`: max has the slowest only, all each rank by its number.",
        dict[str, _ByName],
    ),
    "metrics": RowField(
        "", "`hooks.metrics`", "The numbers of your own functions, by the names of the functions.", _ByName
    ),
    "valid_loss": RowField("nats per token", _VALIDATION, "Mean loss of the valid tokens. Null without one."),
    "valid_ppl": RowField("", _VALIDATION, "Perplexity: the exponential of `valid_loss`."),
    "valid_sop_loss": RowField(
        "nats per sample",
        "validation of BERT",
        "As `sop_loss`; each further loss has such a field.",
    ),
    "tasks": RowField(
        "",
        "tasks",
        "Of each task its metrics, as in `{TASK: {METRIC: number}}`; see `evaluation.tasks`.",
        dict[str, _ByName],
    ),
    "save_bytes": RowField("bytes", "a save", "Size of all rank files of the checkpoint of `iteration`.", int),
    "save_stage_s": RowField(
        "s",
        "a save",
        "Time in which the training of the slowest rank waited for copies of the state, which are made beside the next "
        "forward and backward pass; 0 without `checkpoint.async_save`.",
    ),
    "save_wait_s": RowField(
        "s",
        "a save",
        "Time in which the training waited for the writing: all of it without `checkpoint.async_save`, else that after "
        "the next save was due, or the run's end.",
    ),
    "save_drain_s": RowField("s", "a save", "Time from the first byte until the checkpoint was complete."),
    "copy_bytes": RowField(
        "bytes",
        "a copy",
        "Size of the state of `iteration` over all ranks, copied to the nodes; see `checkpoint.copy_interval`.",
        int,
    ),
    "copy_stage_s": RowField(
        "s", "a copy", "Time in which the training waited for copies in host memory, on the slowest rank."
    ),
    "copy_wait_s": RowField(
        "s",
        "a copy",
        "Time in which the training waited for the writing, after the next copy was due or the run's end.",
    ),
    "copy_drain_s": RowField("s", "a copy", "Time from the first byte until all nodes had written theirs."),
    "missed_save": RowField("", "a missed save", "The reason why the disk refused a checkpoint.", str),
    "loss_spike": RowField("nats per token", "a spike", "Loss of the step; see `training.on_loss_spike`."),
    "loss_before": RowField("nats per token", "a spike", "Median of the losses before it."),
}
"""Field -> its description, in the order of the page. A number that is not finite is null."""
