"""``llmctl data``: training data in Megatron-LM's .bin/.idx, and vocabularies, where a cluster's jobs read them."""

from typing import Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.data_prepare import EPILOG, prepare
from llmctl.cli.data_train_tokenizer import train_tokenizer
from llmctl.context import Context

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_CLUSTER = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The cluster. Default: as for submit.", autocompletion=complete_cluster),
]
_WITH_ADDED_TOKENS = Annotated[
    bool,
    typer.Option(
        "--tokenizer-hf-include-special-tokens", help="The data was prepared with this flag, or by Megatron-LM."
    ),
]
_PATHS = Annotated[
    list[str], typer.Argument(metavar="PATH...", help="Prefixes of .bin/.idx pairs, one of their files, or folders.")
]


@app.callback()
def data() -> None:
    """Make training data of text, on any cluster; look at it, and join it, where jobs are submitted from."""


app.command(epilog=EPILOG)(prepare)
app.command()(train_tokenizer)


@app.command()
def inspect(
    ctx: typer.Context,
    paths: _PATHS,
    tokenizer_model: Annotated[
        str | None,
        typer.Option(
            "--tokenizer-model",
            "--tokenizer",
            metavar="FILE",
            help="Decode samples with this tokenizer: its file or folder.",
        ),
    ] = None,
    tokenizer_type: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Its kind, under Megatron-LM's name. Default: told from the files."),
    ] = None,
    vocab_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="vocab.json (GPT-2) or vocab.txt (BERT) of the tokenizer.")
    ] = None,
    merge_file: Annotated[str | None, typer.Option(metavar="FILE", help="merges.txt (GPT-2).")] = None,
    vocab_size: Annotated[int | None, typer.Option(metavar="N", help="How many numbers a NullTokenizer takes.")] = None,
    vocab_extra_ids: Annotated[int | None, typer.Option(metavar="N", min=0, help="T5: number of <extra_id_i>.")] = None,
    tiktoken_pattern: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="r50k, p50k, cl100k, o200k, v1, v2 or a regular expression, if not told."),
    ] = None,
    tiktoken_num_special_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Ids before the first rank of a list in JSON. Default: 1000.")
    ] = None,
    tokenizer_hf_include_special_tokens: _WITH_ADDED_TOKENS = False,
    special_tokens: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A token added after the vocabulary. Repeatable.")
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", min=0, help="Show the beginnings of so many documents.")] = 3,
    verify: Annotated[bool, typer.Option("--verify", help="Read every token, and compare with the checksums.")] = False,
    cluster: _CLUSTER = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Show documents, tokens, lengths and samples, and say what is damaged; exit code 3 if anything is."""
    words = ["inspect-data", "--samples", str(samples)]
    given = {
        "--tokenizer-model": tokenizer_model,
        "--tokenizer-type": tokenizer_type,
        "--vocab-file": vocab_file,
        "--merge-file": merge_file,
        "--vocab-size": vocab_size,
        "--vocab-extra-ids": vocab_extra_ids,
        "--tiktoken-pattern": tiktoken_pattern,
        "--tiktoken-num-special-tokens": tiktoken_num_special_tokens,
    }
    words += [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    words += ["--tokenizer-hf-include-special-tokens"] if tokenizer_hf_include_special_tokens else []
    words += ["--tokenizer-special-tokens", *special_tokens] if special_tokens else []
    words += ["--verify"] if verify else []
    words += ["--json"] if as_json else []
    return _run(ctx.obj, cluster, [*words, "--", *paths])


@app.command()
def merge(
    ctx: typer.Context,
    paths: _PATHS,
    output: Annotated[str, typer.Option(metavar="PREFIX", help="The pair to write.")],
    cluster: _CLUSTER = None,
) -> int:
    """Join pairs that were made with one tokenizer into one, in the order in which they are named."""
    return _run(ctx.obj, cluster, ["merge-data", f"--output-prefix={output}", "--input", *paths])


def _run(context: Context, cluster: str | None, words: list[str]) -> int:
    from llmctl.operate.trainer_command import run_trainer_command

    return run_trainer_command(context, context.profile(*context.cluster(cluster)), words)
