"""``llmctl data train-tokenizer``: a vocabulary of raw text, on this machine or on a cluster's CPU node."""

from typing import Annotated

import typer

from llmctl.cli.data_job import (
    AsJson,
    Cluster,
    Container,
    DryRun,
    Follow,
    Group,
    Mounts,
    Queue,
    ResourceType,
    Time,
    start,
    switch,
    trainer_words,
    value,
)

_TRAINER_FLAGS = {
    "output": "--output",
    "vocab_size": "--vocab-size",
    "model": "--model",
    "sample_bytes": "--sample-bytes",
    "keep_case": "--keep-case",
}
"""Name of our parameter -> the trainer's flag."""


def train_tokenizer(
    ctx: typer.Context,
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="Files, quoted patterns or folders: .jsonl, .parquet, text.")
    ],
    output: Annotated[str, value("FILE", "tokenizer.json, a SentencePiece .model or BERT's vocab.txt.")],
    vocab_size: Annotated[int, value("N", "Tokens, special ones included.")],
    model: Annotated[
        str | None,
        value(
            "byte-level-bpe|unigram|bpe|wordpiece",
            "Kind of vocabulary. Default: by the output's name; unigram for .model, wordpiece for .txt.",
        ),
    ] = None,
    json_keys: Annotated[list[str] | None, value("KEY", "Key, or column, of the text. Repeatable.")] = None,
    special_tokens: Annotated[
        list[str] | None, value("NAME", "A further token that no text becomes. Repeatable.")
    ] = None,
    keep_case: Annotated[bool, switch("--keep-case", "wordpiece: keep capitals and accents.")] = False,
    sample_bytes: Annotated[
        str | None,
        value("N", "Learn from so much of the files, spread evenly. Default: 4G, or 400M for unigram and bpe."),
    ] = None,
    cluster: Cluster = None,
    time: Time = None,
    name: Annotated[str | None, value("N", "Name of the run. Default: train-tokenizer.")] = None,
    group: Group = None,
    resource_type: ResourceType = None,
    queue: Queue = None,
    container: Container = None,
    mounts: Mounts = None,
    dry_run: DryRun = False,
    follow: Follow = False,
    as_json: AsJson = False,
) -> int:
    """Learn a vocabulary of text; the same text gives the same file. On a cluster it is a job."""
    given = locals()
    from llmctl.operate.data_jobs import DataWork

    words = trainer_words(given, _TRAINER_FLAGS)
    words += ["--json-keys", *json_keys] if json_keys else []
    words += ["--special-tokens", *special_tokens] if special_tokens else []
    work = DataWork("train-tokenizer", (*words, "--input", *inputs), (*inputs, output), "train-tokenizer")
    return start(ctx.obj, work, given)
