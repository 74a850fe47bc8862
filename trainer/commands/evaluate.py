"""``python -m trainer evaluate``: perplexity of a text, or metrics of tasks. The program behind ``llmctl evaluate``.

Exit codes: 0 done, 1 failed, 2 a flag, 3 input that cannot be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.model_ranks import (
    INPUT_ERRORS,
    layout_of,
    model_on_rank,
    run_on_ranks,
    tell_bad_input,
)
from trainer.config.command_parser import print_text
from trainer.config.evaluate_flags import parse
from trainer.config.records.json_text import json_text
from trainer.config.sections.data import DataConfig
from trainer.config.tokenizer_keys import TokenizerKeys
from trainer.data.errors import DataError
from trainer.data.samples.sources import document_rules, open_data, single_source
from trainer.data.tokenizers.settings import TokenizerSettings, settings_of
from trainer.evaluation.encoding import Encoding
from trainer.evaluation.perplexity import TextEvaluation, evaluate_text, split_tokens
from trainer.evaluation.ranks import ModelRanks
from trainer.evaluation.task_list import check_tasks, load_tasks, task_specs
from trainer.generation.source import ModelSource
from trainer.generation.tokenizers import stop_tokens_of, tokenizer_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from trainer.config.sections.parallel import ParallelConfig
    from trainer.config.train_config import TrainConfig
    from trainer.data.samples.batches import Packing
    from trainer.data.samples.sources import Source
    from trainer.data.tokenizers.tokenizer import Tokenizer
    from trainer.generation.model import GenerationModel
    from trainer.ops.build.build_settings import BuildSettings
    from trainer.process.launch_environment import LaunchEnvironment

_PROGRAM = "llmctl evaluate"


@dataclass(frozen=True)
class _Text:
    """The split that is evaluated, its rules of documents, and the tokenizer that counts its bytes."""

    source: Source
    rules: Packing | None
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class _Request:
    """The checked input of one call, without weights.

    Attributes:
        source: the model.
        layout: ranks of tp, pp and ep.
        tasks: names and files of tasks.
        encoding: of tasks.
        text: instead of tasks.
    """

    source: ModelSource
    layout: ParallelConfig
    tasks: list[str]
    encoding: Encoding | None
    text: _Text | None

    @classmethod
    def check(cls, options: argparse.Namespace, *, rank: int = 0) -> _Request:
        """Read everything but the weights; only rank 0 looks for the tasks.

        Raises:
            CheckpointError, ConfigError, DataError, EvaluationError, FamilyError, GenerationError, HubError: one
                sentence on the first problem.
        """
        source = ModelSource.open(Path(options.source).expanduser())
        layout = layout_of(options)
        config = source.config_with(layout)
        if options.tasks is None:
            return cls(source, layout, [], None, _open_text(config, options))
        tasks = task_specs(options.tasks)
        if rank == 0:
            check_tasks(tasks)
        return cls(source, layout, tasks, _encoding_of(source, options.tokenizer), None)


def _encoding_of(source: ModelSource, named: Path | None) -> Encoding:
    tokenizer = tokenizer_of(source, named)
    if named is not None:
        settings = TokenizerSettings(tokenizer_model=str(named))
    elif source.hub_folder is not None and source.iteration == 0:
        settings = TokenizerSettings(tokenizer_model=str(source.hub_folder))
    else:
        settings = settings_of(source.config.data, source.config.model.vocab_size)
    return Encoding.open(settings, stop_tokens_of(source, tokenizer))


def _open_text(config: TrainConfig, options: argparse.Namespace) -> _Text:
    config = _with_data(config, options)
    opened = open_data(config)
    if options.split not in opened.blends:
        raise DataError(f"--split: the data has no {options.split} split, only {', '.join(opened.blends)}")
    source = single_source(opened.blends[options.split])
    start, stop = split_tokens(source)
    if (held := stop - start) < 2:
        cure = "" if options.split == "train" else "--split train, or "
        raise DataError(
            f"--split: the {options.split} split of {source.tokens.prefix} has {held} token{'s' * (held != 1)}, but a "
            f"loss needs two; use {cure}--data-path with a dataset that `llmctl data prepare` makes of text"
        )
    rules = document_rules(config, [source], opened.tokenizer)
    return _Text(source, rules, opened.tokenizer if settings_of(config.data).has_files else None)


def _with_data(config: TrainConfig, options: argparse.Namespace) -> TrainConfig:
    # Every token of the text counts, including ends of documents.
    data = config.data.model_dump() | {"eod_mask_loss": False}
    if options.data_path is not None:
        data |= {"data_path": [options.data_path], "train_data_path": [], "valid_data_path": [], "mock_data": False}
        data["streaming"] = False
    if options.data_split is not None:
        data["split"] = options.data_split
    if options.tokenizer is not None:
        data |= TokenizerKeys(tokenizer_model=str(options.tokenizer)).model_dump()
    if not any(data[key] for key in ("data_path", "train_data_path", "valid_data_path", "mock_data")):
        raise DataError("--data-path: the model has no data of its own; name the prefix of an indexed dataset")
    if data["mock_data"]:
        raise DataError("--data-path: the run used mock data; name the prefix of an indexed dataset")
    return config.model_copy(update={"data": DataConfig(**data)})


def main(arguments: Sequence[str], environment: MutableMapping[str, str]) -> int:
    """Run the command.

    Without a launcher this process starts the other ranks of the layout on this machine.
    """
    return run_on_ranks(_PROGRAM, parse(arguments, _PROGRAM), environment, _Request.check, _evaluate)


def _evaluate(
    launch: LaunchEnvironment, store: Store | None, options: argparse.Namespace, settings: BuildSettings
) -> int:
    """The work of one rank; returns its exit code."""
    try:
        request = _Request.check(options, rank=launch.rank)
        # Before the other ranks wait for requests: rank 0 may be unable to load the tasks.
        tasks = load_tasks(request.tasks) if request.tasks and launch.rank == 0 else None
        with model_on_rank(_PROGRAM, request.source, request.layout, launch, store, settings) as model:
            if request.text is not None:
                text = request.text
                found = evaluate_text(model, text.source, text.tokenizer, options.max_tokens, text.rules)
                if launch.rank == 0:
                    _print_text_evaluation(model, found, options)
            elif request.encoding is not None:
                metrics = _evaluate_tasks(model, request.encoding, tasks, options.limit, launch)
                if launch.rank == 0:
                    _print_metrics(model, metrics, options)
    except INPUT_ERRORS as error:
        return tell_bad_input(_PROGRAM, launch, error)
    return 0


def _evaluate_tasks(
    model: GenerationModel, encoding: Encoding, tasks: object, limit: int | None, launch: LaunchEnvironment
) -> dict[str, dict[str, float]]:
    ranks = ModelRanks(model, encoding.bare)
    if launch.rank > 0:
        ranks.follow()
        return {}
    from trainer.evaluation.harness import evaluate_tasks

    try:
        return evaluate_tasks(ranks, encoding, tasks, limit)
    finally:
        ranks.release()


def _print_text_evaluation(model: GenerationModel, found: TextEvaluation, options: argparse.Namespace) -> None:
    if options.json:
        print_text(json_text({"checkpoint": str(model.checkpoint), "iteration": model.iteration, **asdict(found)}))
        return
    per_byte = f", {found.bits_per_byte:.4f} bits per byte" if found.bits_per_byte is not None else ""
    print_text(
        f"{model.checkpoint.name} on {options.split}, {found.tokens:,} tokens: loss {found.loss:.4f} nats per token, "
        f"perplexity {found.perplexity:.2f}{per_byte}"
    )


def _print_metrics(
    model: GenerationModel, metrics: Mapping[str, Mapping[str, float]], options: argparse.Namespace
) -> None:
    if options.json:
        answer = {"checkpoint": str(model.checkpoint), "iteration": model.iteration, "tasks": metrics}
        print_text(json_text(answer))
        return
    print_text(f"{'TASK':30} {'METRIC':30} VALUE")
    for task, values in metrics.items():
        for name, value in values.items():
            print_text(f"{task:30} {name:30} {value:.4f}")
