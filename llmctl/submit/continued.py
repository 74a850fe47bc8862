"""``submit --hf FOLDER --data TEXT``: continued pretraining of a published model, without a config file."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmctl.submit.job import Flag, Problem
from llmctl.submit.origins import Origin, Resolved
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport
from trainer.planning.start_model import section_of

_BYTES_PER_TOKEN = 4
"""Of English text with a vocabulary of 50,000; other texts differ by a factor of two."""
_LONGEST, _SHORTEST, _SAMPLES = 2048, 128, 8
_FEWEST_ITERATIONS = 50
_NOT_TEXT = (".yaml", ".yml", ".sh", ".idx", ".bin")
"""Endings of configs, scripts and prepared data."""
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


def continued_problem(folder: str | None, texts: Sequence[str]) -> str:
    """A sentence if the two flags do not name a folder and texts; empty if they do."""
    if not folder or not texts:
        given, missing = ("--data", "--hf FOLDER") if not folder else ("--hf", "--data TEXT")
        return f"{given}: also give {missing}: a published model is trained on text"
    wrong = next((text for text in texts if text.endswith(_NOT_TEXT)), None)
    if wrong is not None:
        return f"--data: {wrong} is not text; --hf takes the place of CONFIG, so leave that out, or leave out --hf"
    return "" if all(texts) else "--data: is empty; name a file of text"


def continued_flags(folder: str, texts: Sequence[str]) -> list[Flag]:
    """The values that the two flags stand for; those of other flags come after them and win."""
    given = {"checkpoint.load": folder, "data.tokenizer_model": folder, **_DEFAULTS}
    return [*(Flag("--hf", key, value) for key, value in given.items()), Flag("--data", "data.data_path", [*texts])]


def with_lengths(resolved: Resolved, transport: Transport, *, has_gpus: bool) -> tuple[Resolved, list[str]]:
    """Fill in what depends on the model and the text: length of a sample, iterations, precision; and say so.

    One pass over the text, in samples that the model's positions allow, shorter for little text. Values that are not
    valid are left to the config's check.

    Args:
        resolved: with the model of the folder.
        transport: to a machine that has the text.
        has_gpus: the job gets GPUs, as far as the profile says.

    Raises:
        UsageError: the size of the text is not known, and no training.train_iters is given.
    """
    training, model = section_of(resolved.values, "training"), section_of(resolved.values, "model")
    tokens = _tokens_of(resolved, transport, is_needed="train_iters" not in training)
    samples = _number(training.get("global_batch_size"), _SAMPLES)
    length = min(_LONGEST, _number(model.get("max_position_embeddings"), _LONGEST))
    # Little text still makes some iterations, so that a loss can be seen to fall.
    while length // 2 >= _SHORTEST and tokens < _FEWEST_ITERATIONS * samples * length:
        length //= 2
    length = _number(training.get("seq_length"), length)
    iterations = _number(training.get("train_iters"), max(1, tokens // (samples * length)))
    often = max(10, iterations // 5)
    chosen = {
        "training.seq_length": length,
        "training.train_iters": iterations,
        "training.eval_interval": often,
        "training.eval_iters": min(20, often // 10),
        "checkpoint.save_interval": often,
        **({"training.bf16": True} if has_gpus else {}),
    }
    values, origins = {**resolved.values}, {**resolved.origins}
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        # Flags win; a section that one of them has made a plain value is told by the config's check.
        if key not in origins and section not in origins:
            values[section] = {**section_of(values, section), name: value}
            origins[key] = Origin("--hf", is_flag=True)
    rate = section_of(values, "optimizer").get("lr")
    note = (
        f"about {tokens:,} tokens of text: {iterations} iterations of {samples} samples of {length} tokens, learning "
        f"rate {rate}; --set training.train_iters=N and others change it"
    )
    return replace(resolved, values=values, origins=origins), [note]


def _tokens_of(resolved: Resolved, transport: Transport, *, is_needed: bool) -> int:
    """About the number of tokens in the texts, by their sizes. Refuses texts of unknown size if ``is_needed``."""
    texts = section_of(resolved.values, "data").get("data_path")
    texts = [text for text in texts if isinstance(text, str)] if isinstance(texts, list) else []
    parts = transport.read_parts([FileRead(text, 0, 1) for text in texts])
    unknown = next((text for text, part in zip(texts, parts, strict=True) if part is None), None)
    if unknown is not None and is_needed:
        problem = f"{unknown} is not a file that can be read; name files, or also give --set training.train_iters=N"
        raise resolved.error([Problem("data.data_path", problem)])
    return sum(part.size for part in parts if part is not None) // _BYTES_PER_TOKEN


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default
