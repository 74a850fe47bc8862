"""``submit --hf FOLDER --data TEXT``: continued pretraining of a published model, without a config file."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from llmctl.submit.job import Flag, Problem
from llmctl.submit.origins import Origin, Resolved
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport

_BYTES_PER_TOKEN = 4
"""Of English text with a vocabulary of 50,000; other texts differ by a factor of two."""
_LONGEST, _SHORTEST, _SAMPLES = 2048, 128, 8
_FEWEST_ITERATIONS = 50
_DEFAULTS: Mapping[str, Any] = {
    "checkpoint.save_hugging_face": True,
    "checkpoint.keep_last": 2,
    "data.streaming": True,
    # A text file of many documents has blank lines between them.
    "data.streaming_text_document": "paragraph",
    "data.split": "98,2,0",
    "training.micro_batch_size": 1,
    "training.global_batch_size": _SAMPLES,
    # A tenth of the rates of pretraining: the weights are to be kept.
    "optimizer.lr": 2e-5,
    "optimizer.min_lr": 2e-6,
    "optimizer.lr_decay_style": "cosine",
    "optimizer.lr_warmup_fraction": 0.05,
    "optimizer.weight_decay": 0.01,
}


def continued_flags(folder: str, texts: Sequence[str]) -> list[Flag]:
    """The values that the two flags stand for; those of other flags come after them and win."""
    name = PurePosixPath(folder).name
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name)
    given = {
        "job.name": kept.lstrip("._-")[:64] or "continued",
        "checkpoint.load": folder,
        "data.tokenizer_model": folder,
        **_DEFAULTS,
    }
    return [*(Flag("--hf", key, value) for key, value in given.items()), Flag("--data", "data.data_path", [*texts])]


def with_lengths(resolved: Resolved, transport: Transport, *, has_gpus: bool) -> tuple[Resolved, list[str]]:
    """Fill in what depends on the model and the text: length of a sample, iterations, precision; and say so.

    One pass over the text, in samples that the model's positions allow, shorter for little text.

    Args:
        resolved: with the model of the folder.
        transport: to a machine that has the text.
        has_gpus: the job gets GPUs, as far as the profile says.

    Raises:
        UsageError: the size of the text is not known, and no training.train_iters is given.
    """
    training, texts = dict(resolved.values["training"]), resolved.values["data"]["data_path"]
    positions = resolved.values["model"].get("max_position_embeddings") or _LONGEST
    parts = transport.read_parts([FileRead(text, 0, 1) for text in texts])
    tokens = sum(part.size for part in parts if part is not None) // _BYTES_PER_TOKEN
    if any(part is None for part in parts) and "train_iters" not in training:
        text = next(text for text, part in zip(texts, parts, strict=True) if part is None)
        problem = f"{text} is not a file that can be read; name files, or also give --set training.train_iters=N"
        raise resolved.error([Problem("data.data_path", problem)])
    samples = training["global_batch_size"] if isinstance(training["global_batch_size"], int) else _SAMPLES
    length = min(_LONGEST, positions)
    # Little text still makes some iterations, so that a loss can be seen to fall.
    while length // 2 >= _SHORTEST and tokens < _FEWEST_ITERATIONS * samples * length:
        length //= 2
    length = training.get("seq_length", length)
    iterations = max(1, tokens // (samples * length)) if isinstance(length, int) else 1
    iterations = training.get("train_iters", iterations)
    often = max(10, iterations // 5) if isinstance(iterations, int) else 10
    chosen = {
        "training.seq_length": length,
        "training.train_iters": iterations,
        "training.eval_interval": often,
        "training.eval_iters": min(20, often // 10),
        "checkpoint.save_interval": often,
        "logging.log_interval": min(10, often // 10),
        **({"training.bf16": True} if has_gpus else {}),
    }
    values, origins = {**resolved.values}, {**resolved.origins}
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        # Flags win.
        if key not in origins:
            values[section] = {**values.get(section, {}), name: value}
            origins[key] = Origin("--hf", is_flag=True)
    note = (
        f"about {tokens:,} tokens of text: {iterations} iterations of {samples} samples of {length} tokens, "
        "learning rate 2e-5; --set training.train_iters=N and others change it"
    )
    return replace(resolved, values=values, origins=origins), [note]
