"""``llmctl data prepare``: raw text to training data, on this machine or on a cluster's CPU nodes."""

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

EPILOG = (
    "Killed or cancelled at any instant, the same command goes on where it was, and makes the same bytes. On another "
    "cluster than this machine it is a job: llmctl resume RUN goes on with it."
)

_TRAINER_FLAGS = {
    "tokenizer": "--tokenizer-model",
    "tokenizer_type": "--tokenizer-type",
    "vocab_file": "--vocab-file",
    "merge_file": "--merge-file",
    "vocab_size": "--vocab-size",
    "vocab_extra_ids": "--vocab-extra-ids",
    "tiktoken_pattern": "--tiktoken-pattern",
    "tiktoken_num_special_tokens": "--tiktoken-num-special-tokens",
    "tokenizer_hf_include_special_tokens": "--tokenizer-hf-include-special-tokens",
    "eod_token": "--eod-token",
    "append_eod": "--append-eod",
    "split_sentences": "--split-sentences",
    "keep_newlines": "--keep-newlines",
    "text_document": "--text-document",
    "on_error": "--on-error",
    "workers": "--workers",
    "restart": "--restart",
}
"""Name of our parameter -> the trainer's flag."""
_WithAddedTokens = Annotated[
    bool,
    switch(
        "--tokenizer-hf-include-special-tokens",
        "Add what a tokenizer.json puts around a text, and read special tokens in it, as Megatron-LM does.",
    ),
]


def prepare(
    ctx: typer.Context,
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="Files, quoted patterns or folders: .jsonl, .parquet, text.")
    ],
    output: Annotated[str, value("PREFIX", "What the names of the pairs begin with.")],
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", "--tokenizer-model", metavar="FILE", help="The tokenizer: its file or folder."),
    ] = None,
    tokenizer_type: Annotated[str | None, value("TYPE", "Its kind, under Megatron-LM's name. Default: told.")] = None,
    vocab_file: Annotated[str | None, value("FILE", "vocab.json (GPT-2) or vocab.txt (BERT).")] = None,
    merge_file: Annotated[str | None, value("FILE", "merges.txt (GPT-2).")] = None,
    vocab_size: Annotated[int | None, value("N", "How many numbers a NullTokenizer takes.")] = None,
    vocab_extra_ids: Annotated[int | None, value("N", "T5: number of <extra_id_i>.", min=0)] = None,
    tiktoken_pattern: Annotated[
        str | None, value("PATTERN", "r50k, p50k, cl100k, o200k, v1, v2 or a regular expression, if not told.")
    ] = None,
    tiktoken_num_special_tokens: Annotated[
        int | None, value("N", "Ids before the first rank of a list in JSON. Default: 1000.", min=0)
    ] = None,
    tokenizer_hf_include_special_tokens: _WithAddedTokens = False,
    special_tokens: Annotated[
        list[str] | None, value("NAME", "A token to add after the vocabulary. Repeatable.")
    ] = None,
    eod_token: Annotated[str | None, value("NAME", "The token that ends a document, if not told.")] = None,
    json_keys: Annotated[list[str] | None, value("KEY", "Key, or column, of the text. Repeatable.")] = None,
    append_eod: Annotated[bool, switch("--append-eod", "End each document with the end-of-document token.")] = False,
    split_sentences: Annotated[bool, switch("--split-sentences", "Make each sentence a sequence (BERT, T5).")] = False,
    keep_newlines: Annotated[bool, switch("--keep-newlines", "Keep the white space after sentences.")] = False,
    text_document: Annotated[
        str | None, value("file|paragraph|line", "What is a document in plain text. Default: file.")
    ] = None,
    on_error: Annotated[str | None, value("stop|skip", "At what is no document. Default: stop.")] = None,
    workers: Annotated[int | None, value("N", "Processes per node. Default: its CPUs.", min=1)] = None,
    restart: Annotated[bool, switch("--restart", "Throw away what an unfinished run has done.")] = False,
    cluster: Cluster = None,
    nodes: Annotated[int | None, value("N", "Nodes that share the work.", min=1)] = None,
    time: Time = None,
    name: Annotated[str | None, value("N", "Name of the run. Default: prepare.")] = None,
    group: Group = None,
    resource_type: ResourceType = None,
    queue: Queue = None,
    container: Container = None,
    mounts: Mounts = None,
    dry_run: DryRun = False,
    follow: Follow = False,
    as_json: AsJson = False,
) -> int:
    """Turn text into Megatron-LM's .bin/.idx: PREFIX_KEY_document, or _sentence, with a manifest."""
    given = locals()
    from llmctl.operate.data_jobs import DataWork

    words = [f"--output-prefix={output}", *trainer_words(given, _TRAINER_FLAGS)]
    words += ["--json-keys", *json_keys] if json_keys else []
    words += ["--tokenizer-special-tokens", *special_tokens] if special_tokens else []
    paths = (*inputs, output, *(path for path in (tokenizer, vocab_file, merge_file) if path is not None))
    work = DataWork("preprocess", (*words, "--input", *inputs), paths, "prepare", by_nodes=True)
    return start(ctx.obj, work, given)
