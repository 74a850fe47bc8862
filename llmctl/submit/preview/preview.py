"""The rows that ``submit`` and ``--dry-run`` show about a run, and the same facts for machines."""

from typing import TYPE_CHECKING

from llmctl.durations import clock, duration_text
from llmctl.paths import UserFolders
from llmctl.submit.job import SubmitPlan
from llmctl.submit.preview.calibration import known_device
from llmctl.submit.preview.disk import checkpoints_text
from llmctl.submit.preview.estimate import device_of, estimate_of
from llmctl.submit.preview.place import Preview, TrainingFacts, counted, place_rows
from llmctl.transport.protocol import Transport
from trainer.config.train_config import TrainConfig
from trainer.planning.estimate.devices import GIB
from trainer.planning.estimate.known_sizes import DatasetSize, dataset_size, vocabulary_of
from trainer.planning.estimate.plan import RunPlan
from trainer.planning.flops import count_parameters

if TYPE_CHECKING:
    from trainer.planning.start_model import Files


def preview_of(
    plan: SubmitPlan, files: "Files", here: Transport, free_bytes: int | None, folders: UserFolders
) -> Preview:
    """Describe the submission of a training run.

    Args:
        plan: of the submission.
        files: of the machine that has the job's files.
        here: to this machine.
        free_bytes: on the file system of the checkpoints; None: unknown.
        folders: of the user, with the calibration of the cluster.

    Raises:
        UsageError, RecordError: the calibration or the measured hardware is damaged.
    """
    job, config = plan.job, plan.job.config
    assert config is not None
    data = dataset_size(config, files)
    vocabulary = vocabulary_of(config, data, files)
    device = device_of(job, here)
    if device is not None:
        device = known_device(folders, job.profile.name, device).device
    planned = estimate_of(job, vocabulary, device)
    world = job.request.nodes * job.request.ranks_per_node
    sizes = config.batch_sizes(config.data_parallel_size(world))
    tokens = sizes.samples_after(config.training.train_iters) * config.tokens_per_sample
    rows = [
        ("model", _model(config, vocabulary)),
        ("layout", _layout(config, world)),
        ("batch", _batch(config, world)),
        ("length", f"{counted(config.training.train_iters, 'step')} = {_short(tokens)} tokens"),
        ("data", _data(config, data, tokens)),
        ("start", _start(plan, config)),
        ("estimate", _estimate(planned, config)),
        ("disk", _disk(config, vocabulary, free_bytes)),
        *place_rows(job),
        ("defaults", _defaults(plan, config)),
    ]
    return Preview(tuple(row for row in rows if row[1]), _facts(config, vocabulary, data, tokens, planned))


def _model(config: TrainConfig, vocabulary: int | None) -> str:
    model = config.model
    kind = {"bert": "BERT, ", "t5": "T5, "}.get(model.architecture, "")
    shape = f"{kind}{model.num_layers} layers of {model.hidden_size}, {model.num_attention_heads} heads"
    if vocabulary is None:
        return f"{shape}, vocabulary unknown"
    counts = count_parameters(config, vocabulary)
    active = f" ({_short(counts.active)} per token)" if counts.active != counts.total else ""
    return f"{_short(counts.total)} parameters{active}: {shape}, vocabulary {vocabulary:,}"


def _layout(config: TrainConfig, world: int) -> str:
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "dp": config.data_parallel_size(world),
    }
    axes = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "no parallelism"
    zero = f", ZeRO-{parallel.zero_stage}" if parallel.zero_stage else ""
    precision = "bf16" if config.training.bf16 else "fp16" if config.training.fp16 else "fp32"
    return f"{counted(world, 'rank')}: {axes}{zero}, {precision}"


def _batch(config: TrainConfig, world: int) -> str:
    dp = config.data_parallel_size(world)
    samples, sizes = config.global_batch_size(dp), config.batch_sizes(dp)
    micro, accumulated = config.training.micro_batch_size, config.num_micro_batches(dp)
    parts = f"micro-batch {micro}" + f" x {accumulated} accumulated" * (accumulated > 1) + f" x dp {dp}" * (dp > 1)
    grows = "" if sizes.are_constant else f", from {sizes.at(0):,} samples ({sizes.span})"
    tokens = samples * config.tokens_per_sample
    return f"{samples:,} samples of {config.tokens_per_sample:,} = {tokens:,} tokens a step ({parts}){grows}"


def _data(config: TrainConfig, data: DatasetSize, tokens: int) -> str:
    if config.data.mock_data:
        return "generated, for tests of a cluster"
    names = [path.rpartition("/")[2] for key, path in config.data_prefixes() if key != "data.test_data_path"]
    shown = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    if config.data.streaming:
        return f"{shown}, tokenized while training"
    if data.tokens is None:
        return shown
    epochs = f" = {tokens / data.tokens:.2g} epochs" if data.tokens else ""
    return f"{shown}: {_short(data.tokens)} tokens{epochs}"


def _start(plan: SubmitPlan, config: TrainConfig) -> str:
    if not plan.is_new:
        return f"resumes {plan.job.run_id} from its latest checkpoint"
    new = f"new weights, seed {config.training.seed}"
    if config.continues_save:
        return f"latest checkpoint in {config.checkpoint.save}; while it holds none, {new}"
    if config.checkpoint.load is not None:
        return f"weights of {config.checkpoint.load}"
    return new


def _estimate(planned: RunPlan | str, config: TrainConfig) -> str:
    if isinstance(planned, str):
        return planned
    device, total = planned.device, planned.step.total * config.full_iters
    step = "full step" if config.changes_batch_size else "step"
    memory = f"{planned.worst.total / GIB:.2g} of {device.memory / GIB:.3g} GiB"
    fits = "" if planned.verdict == "fits" else f" ({planned.verdict})"
    took = duration_text(total) if total >= 1 else "less than 1 s"
    return f"{memory}{fits}, {took} at {planned.step.total:.2g} s a {step}, on {device.name}"


def _disk(config: TrainConfig, vocabulary: int | None, free_bytes: int | None) -> str:
    if vocabulary is None or free_bytes is None:
        return ""
    return checkpoints_text(config, count_parameters(config, vocabulary).total, free_bytes)


def _defaults(plan: SubmitPlan, config: TrainConfig) -> str:
    """Values of weight that neither the command nor the config names."""
    job, given = plan.job, plan.record.origins
    request, training = job.request, config.training
    values = {
        "job.nodes": counted(request.nodes, "node"),
        "job.resource_type": request.resource_type,
        "job.time": clock(request.time_s) if request.time_s is not None and job.cost is not None else None,
        "training.bf16": None if training.bf16 or training.fp16 else "fp32",
        "training.global_batch_size": None if config.changes_batch_size else "batch = micro-batch x dp",
        "checkpoint.save_interval": "checkpoint at the end only" if config.checkpoint.save_interval is None else None,
    }
    return ", ".join(text for key, text in values.items() if text and key not in given)


def _facts(
    config: TrainConfig, vocabulary: int | None, data: DatasetSize, tokens: int, planned: RunPlan | str
) -> TrainingFacts:
    counts = None if vocabulary is None else count_parameters(config, vocabulary)
    facts: TrainingFacts = {
        "parameters": None if counts is None else counts.total,
        "vocabulary": vocabulary,
        "data_tokens": data.tokens,
        "train_tokens": tokens,
        "fits": None,
        "peak_memory_bytes": None,
        "iteration_time_s": None,
        "device": None,
    }
    if not isinstance(planned, str):
        facts["fits"] = planned.fits
        facts["peak_memory_bytes"] = planned.worst.total
        facts["iteration_time_s"] = planned.step.total
        facts["device"] = planned.device.name
    return facts


def _short(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"
