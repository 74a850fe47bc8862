"""``python -m trainer generate``: continue prompts with a trained model. The program behind ``llmctl generate``.

Exit codes: 0 done, 1 failed, 2 a flag, 3 input that cannot be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from trainer.config.generate_flags import parse
from trainer.config.records.json_text import json_text
from trainer.data.tokenizers.tokenizer import Tokenizer
from trainer.generation.model import GenerationModel, check_rows, most_positions
from trainer.generation.prompts import read_prompts
from trainer.generation.settings import GenerationSettings
from trainer.generation.source import ModelSource
from trainer.generation.text import TextRow, TextStream
from trainer.generation.tokenizers import encode_prompts, stop_tokens_of, tokenizer_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from trainer.config.sections.parallel import ParallelConfig
    from trainer.ops.build.build_settings import BuildSettings
    from trainer.process.launch_environment import LaunchEnvironment

_PROGRAM = "llmctl generate"


@dataclass(frozen=True)
class _Request:
    """The checked input of one call, without weights.

    Attributes:
        source: the model.
        layout: ranks of tp, pp and ep.
        tokenizer: of the model.
        texts: the prompts.
        prompts: their tokens.
        settings: choice of the tokens.
    """

    source: ModelSource
    layout: ParallelConfig
    tokenizer: Tokenizer
    texts: list[str]
    prompts: list[list[int]]
    settings: GenerationSettings

    @classmethod
    def check(cls, options: argparse.Namespace) -> _Request:
        """Read everything but the weights.

        Raises:
            CheckpointError, ConfigError, DataError, FamilyError, GenerationError, HubError: one sentence on the first
                problem.
        """
        texts = read_prompts(options.prompt, options.prompt_file)
        source = ModelSource.open(Path(options.source).expanduser())
        layout = layout_of(options)
        tokenizer = tokenizer_of(source, options.tokenizer)
        prompts = encode_prompts(texts, tokenizer, source)
        source = source.reaching(max(map(len, prompts)) + options.max_new_tokens)
        config = source.config_with(layout)
        settings = GenerationSettings(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            stop_tokens=stop_tokens_of(source, tokenizer),
        )
        check_rows(prompts, source.vocab_size, most_positions(config), more=min(1, settings.max_new_tokens))
        return cls(source, layout, tokenizer, texts, prompts, settings)


def main(arguments: Sequence[str], environment: MutableMapping[str, str]) -> int:
    """Run the command.

    Without a launcher this process starts the other ranks of the layout on this machine.
    """
    return run_on_ranks(_PROGRAM, parse(arguments, _PROGRAM), environment, _Request.check, _generate)


def _generate(
    launch: LaunchEnvironment, store: Store | None, options: argparse.Namespace, settings: BuildSettings
) -> int:
    """The work of one rank; returns its exit code."""
    try:
        request = _Request.check(options)
        with model_on_rank(_PROGRAM, request.source, request.layout, launch, store, settings) as model:
            _continue(model, request, options, speaks=launch.rank == 0)
    except INPUT_ERRORS as error:
        return tell_bad_input(_PROGRAM, launch, error)
    return 0


def _continue(model: GenerationModel, request: _Request, options: argparse.Namespace, *, speaks: bool) -> None:
    """Generate and print. Collective: all ranks, since a stop string ends a row on each of them."""
    is_streaming = speaks and len(request.texts) == 1 and not options.json
    tell = partial(print_text, end="") if is_streaming else None
    rows = [TextRow(TextStream(request.tokenizer, prompt), options.stop, tell) for prompt in request.prompts]
    if is_streaming:
        print_text(_shown_prompt(request.texts[0]), end="")
    begin, count = time.monotonic(), 0
    continuations = model.generate_each(
        request.prompts, request.settings, lambda row, token: rows[row].add(token), batch_size=options.batch_size
    )
    for number, (text, row, found) in enumerate(zip(request.texts, rows, continuations, strict=True)):
        row.finish()
        count += len(found.tokens)
        if not speaks:
            continue
        if options.json:
            answer = {"prompt": text, "text": row.text, "ending": found.ending, "tokens": len(found.tokens)}
            print_text(json_text(answer, ensure_ascii=False))
        elif is_streaming:
            print_text("")
        else:
            print_text(f"--- {number + 1}\n{_shown_prompt(text)}{row.text}")
        if found.ending == "positions":
            print(
                f"{_PROGRAM}: text {number + 1} ends at the model's {model.most_positions} positions",
                file=sys.stderr,
            )
    if speaks:
        seconds = time.monotonic() - begin
        print(f"{count} tokens in {seconds:.1f} s, {count / max(seconds, 1e-9):.1f} per second", file=sys.stderr)


def _shown_prompt(text: str) -> str:
    """The prompt, in bold on a terminal, where nothing else tells it from the model's text."""
    return f"\x1b[1m{text}\x1b[22m" if sys.stdout.isatty() else text
