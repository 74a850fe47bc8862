"""``python -m trainer generate``: continue a prompt with a checkpoint.

Legend: S tokens so far, V vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.directory import CheckpointError
from trainer.checkpoint.metadata import load_metadata
from trainer.commands.serial_model import SerialModel, load_serial_model
from trainer.config.errors import ConfigError
from trainer.data.errors import DataError
from trainer.data.samples.continuation import end_of_documents
from trainer.data.tokenizers.factory import load_tokenizer, open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import Tokenizer
from trainer.ops.build.build_settings import BuildSettings
from trainer.pipeline.executor import forward_logits


def generate_tokens(
    serial: SerialModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 1234,
    stop_token: int | None = None,
) -> list[int]:
    """Tokens that follow ``prompt``, generated one at a time.

    The model sees the last ``training.seq_length`` tokens only, because it was not trained on longer contexts.

    Args:
        serial: the model.
        prompt: at least one token.
        max_new_tokens: maximum number of new tokens.
        temperature: divisor of the logits; 0 takes the most likely token each time.
        top_k: draw only from this many most likely tokens; 0 from all. (Fan et al. 2018, arXiv:1805.04833, section 5.4)
        seed: of the draws.
        stop_token: ends the text; not returned.
    """
    random = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        context = torch.tensor([tokens[-serial.config.training.seq_length :]], device=serial.device)
        logits = forward_logits(serial.model, context)
        assert logits is not None, "a serial model has the last stage"
        token = choose_token(logits[0, -1].float().cpu(), temperature, top_k, random)
        if token == stop_token:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def choose_token(logits: Tensor, temperature: float, top_k: int, random: torch.Generator) -> int:
    """Draw one token from its logits, float32 [V]."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        weakest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < weakest, -torch.inf)
    shares = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(shares, 1, generator=random))


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command; returns 3 if checkpoint, tokenizer or prompt cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        print(_generate(options, BuildSettings.from_variables(environment)))
    except (CheckpointError, ConfigError, DataError) as error:
        print(f"trainer generate: {error}", file=sys.stderr)
        return 3
    return 0


def _generate(options: argparse.Namespace, settings: BuildSettings) -> str:
    serial = load_serial_model(options.checkpoint, settings=settings)
    for note in serial.notes:
        print(f"trainer generate: {note}", file=sys.stderr)
    tokenizer = _tokenizer(options, serial)
    prompt = tokenizer.encode(options.prompt)
    trained_end = end_of_documents(load_metadata(serial.checkpoint).progress.get("data_state"))
    end = tokenizer.eod if trained_end is None else trained_end
    if not prompt:
        if end is None:
            raise DataError(
                "--prompt: is empty, and the tokenizer has no end-of-document token to start from; give a text"
            )
        prompt = [end]
    new = generate_tokens(
        serial,
        prompt,
        options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        stop_token=end,
    )
    return tokenizer.decode([*prompt, *new])


def _tokenizer(options: argparse.Namespace, serial: SerialModel) -> Tokenizer:
    tokenizer: Tokenizer
    if options.tokenizer is not None:
        tokenizer = open_tokenizer(TokenizerSettings(tokenizer_model=str(options.tokenizer)))
    else:
        tokenizer = load_tokenizer(serial.config.data, serial.config.model.vocab_size)
    if tokenizer.vocab_size > serial.vocab_size:
        raise DataError(
            f"--tokenizer: has {tokenizer.vocab_size} tokens, but the model {serial.vocab_size}; name the "
            "tokenizer of the model's training"
        )
    return tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer generate", description="Continue a prompt.")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder iter_*, the folder that contains it, or a run directory",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer file or folder; default: the run's tokenizer"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--max-new-tokens", type=_count, default=100, metavar="N")
    parser.add_argument(
        "--temperature", type=_temperature, default=1.0, metavar="T", help="0 takes the most likely token each time"
    )
    parser.add_argument("--top-k", type=_count, default=0, metavar="K", help="draw from the K most likely; 0 from all")
    parser.add_argument("--seed", type=int, default=1234, metavar="N")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative; give 0 or more")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of 0 or more")
    return value
