"""The page of ``llmctl checkpoint show``: plain text of at most 80 columns, with colours on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import yaml

from trainer.commands.model_description import ModelDescription
from trainer.config.sections.model import ModelConfig

_COLUMNS, _LABEL = 80, 13


class _Line(NamedTuple):
    """A line of the page.

    Attributes:
        label: first column.
        text: the rest.
        style: of rich, for the text.
    """

    label: str
    text: str
    style: str = ""


def render_page(found: ModelDescription, *, with_tensors: bool, is_for_people: bool) -> str:
    """The page as one text.

    Args:
        found: what to show.
        with_tensors: list the tensors too.
        is_for_people: the output is a terminal, which shows colours.
    """
    lines = list(_lines(found))
    if with_tensors:
        lines += [_Line("", ""), *_tensor_lines(found)]
    # Last, so that the section can be copied from the end of the page.
    lines += _section_lines(found)
    if is_for_people and find_spec("rich") is not None:
        return _coloured(lines)
    return "\n".join((line.label + line.text).rstrip() for line in lines)


def _lines(found: ModelDescription) -> Iterator[_Line]:
    yield _Line("", found.path, "bold")
    yield from _row("format", found.format)
    if found.problem is not None:
        yield from _row("problem", f"cannot be loaded: {found.problem}", "bold red")
    if found.family is not None:
        yield from _row("family", _family(found.family))
    if found.parameters is not None:
        yield from _parameter_lines(found.parameters)
    if found.weights is not None:
        yield from _row("weights", _weights(found.weights))
    if found.training is not None:
        yield from _training_lines(found.training)
    if found.model is not None:
        model = ModelConfig(**found.model)
        yield from _row("shape", _shape(model))
        yield from _row("positions", _positions(model))
        yield from _row("tokenizer", _tokenizer(found.tokenizer, model.vocab_size))
    elif found.tokenizer is not None:
        yield from _row("tokenizer", _tokenizer(found.tokenizer, None))
    for note in found.notes:
        yield from _row("note", note, "yellow")


def _row(label: str, text: str, style: str = "") -> Iterator[_Line]:
    """A label and its text, in as many lines as needed. Paths are never divided."""
    lines = textwrap.wrap(text, _COLUMNS - _LABEL, break_long_words=False, break_on_hyphens=False) or [""]
    for number, line in enumerate(lines):
        yield _Line(("" if number else label).ljust(_LABEL), line, style)


def _family(family: Mapping[str, Any]) -> str:
    if family["name"] is not None:
        return f"{family['name']} (model_type {family['model_type']})"
    return f"no published family; nearest is {family['nearest']}, which differs in {', '.join(family['differs_in'])}"


def _parameter_lines(counts: Mapping[str, Any]) -> Iterator[_Line]:
    total, width = counts["total"], len(f"{counts['total']:,}")

    def line(label: str, count: int, more: str = "") -> _Line:
        share = f"{count / total:7.1%}" if total else ""
        return _Line(label.ljust(_LABEL), f"{count:{width},}{share}{'  ' + more if more else ''}")

    yield _Line("parameters".ljust(_LABEL), f"{total:,}", "bold")
    if counts["active"] != total:
        yield line("  active", counts["active"], "for each token")
    yield line("  embedding", counts["embedding"])
    for layers in counts["layers"]:
        active = f", {layers['active']:,} active" if layers["active"] != layers["parameters"] else ""
        every = layers["count"] * layers["parameters"]
        yield line("  layers", every, f"{layers['count']} {layers['kind']} of {layers['parameters']:,}{active}")
    yield line("  head", counts["head"], "" if counts["head"] else "the table is that of the embedding")
    if counts["ends"]:
        yield line("  ends", counts["ends"], "norms and projections at both ends")


def _weights(weights: Mapping[str, Any]) -> str:
    dtypes = [f"{count:,} tensors in {dtype}" for dtype, count in weights["tensors"].items()]
    files = "1 file" if weights["files"] == 1 else f"{weights['files']:,} files"
    return f"{_size(weights['bytes'])}, {', '.join(dtypes)}; {files} of {_size(weights['file_bytes'])}"


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 10_000_000 else f"{count / 1e6:,.2f} MB"


def _training_lines(training: Mapping[str, Any]) -> Iterator[_Line]:
    if training["is_imported"]:
        yield from _row("training", "imported; iteration 0, weights only")
        return
    seen = f"{training['samples']:,} samples"
    if training["tokens"]:
        seen = f"{training['tokens']:,} tokens ({seen})"
    yield from _row("training", f"iteration {training['iteration']:,}, {seen} seen")
    yield from _row("layout", ", ".join(f"{axis} {size}" for axis, size in training["layout"].items()))
    optimizer = training["optimizer"]
    state = f"{optimizer['name']}, {optimizer['steps']:,} steps; training can go on" if optimizer else "weights only"
    yield from _row("optimizer", state)


def _shape(model: ModelConfig) -> str:
    stacks = f"{model.num_layers} layers"
    if model.is_encoder_decoder:
        stacks = f"{model.num_layers} encoder and {model.num_decoder_layers} decoder layers"
    parts = [stacks, f"hidden {model.hidden_size:,}"]
    heads = f"{model.num_attention_heads} heads of {model.head_dim}"
    if model.multi_latent_attention:
        heads = f"{model.num_attention_heads} heads with latent keys and values of {model.kv_lora_rank}"
    elif model.query_groups != model.num_attention_heads:
        heads += f" with {model.query_groups} key/value heads"
    gate = ", gated" if model.is_gated else ""
    parts += [heads, f"feed-forward {model.ffn_size:,} ({model.activation}{gate})"]
    if model.num_experts:
        parts.append(
            f"{model.num_experts} experts of {model.expert_ffn_size:,}, {model.moe_router_topk} for each token"
        )
    return ", ".join(parts)


def _positions(model: ModelConfig) -> str:
    kind = {"learned_absolute": "learned", "relative": "bias by distance", "alibi": "ALiBi"}.get(
        model.position_embedding_type, model.position_embedding_type
    )
    parts = [kind]
    if kind == "rope":
        parts.append(f"base {model.rotary_base:,.10g}")
        if model.rotary_base_local is not None:
            parts.append(f"{model.rotary_base_local:,.10g} in layers with a window")
        if model.rotary_percent < 1:
            parts.append(f"{model.rotary_percent:.0%} of each head")
        if model.rope_scaling:
            values = {key: value for key, value in model.rope_scaling.items() if key != "rope_type"}
            words = [f"{key} {value}" for key, value in values.items()]
            parts.append(" ".join([str(model.rope_scaling.get("rope_type")), f"({', '.join(words)})"]))
    if model.max_position_embeddings:
        parts.append(f"up to {model.max_position_embeddings:,} tokens")
    windows = [model.window_of(layer) for layer in range(model.num_layers)]
    if any(windows):
        parts.append(f"window of {model.window_size:,} in {len(windows) - windows.count(None)} layers")
    return ", ".join(parts)


def _tokenizer(tokenizer: Mapping[str, Any] | None, rows: int | None) -> str:
    table = f"; the table has {rows:,} rows" if rows else ""
    if tokenizer is None:
        return f"no files here{table}"
    if "problem" in tokenizer:
        return f"{tokenizer['kind']}, cannot be read: {tokenizer['problem']}{table}"
    if "tokens" not in tokenizer:
        return f"{tokenizer['kind']}{table}"
    eos = tokenizer["eos"]
    end = "no eos" if eos["id"] is None else f"eos {eos['id']}" + (f" {eos['name']}" if eos["name"] else "")
    return f"{tokenizer['kind']}, {tokenizer['tokens']:,} tokens, {end}{table}"


def _tensor_lines(found: ModelDescription) -> Iterator[_Line]:
    rows = [(tensor["name"], tensor["dtype"], str(tensor["shape"])) for tensor in found.tensors]
    head = ("tensor", "dtype", "shape")
    name, dtype = (max(len(row[column]) for row in [*rows, head]) for column in (0, 1))
    for row in [head, *rows]:
        style = "bold" if row is head else ""
        yield _Line("", f"{row[0]:{name}}  {row[1]:{dtype}}  {row[2]}", style)


def _section_lines(found: ModelDescription) -> Iterator[_Line]:
    if found.model is not None:
        yield _Line("", "")
        yield _Line("", "model:", "bold")
        for text in _yaml(found.model):
            yield _Line("", f"  {text}")
    elif found.config_json is not None:
        yield _Line("", "")
        yield _Line("", "config.json:", "bold")
        for text in _yaml(found.config_json):
            yield _Line("", f"  {text}")


def _yaml(values: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a mapping, its lists in brackets, to be indented by two."""
    for key, value in values.items():
        style = None if isinstance(value, list) else False
        # A line ends behind the entry that passes this width.
        text = yaml.safe_dump({key: value}, default_flow_style=style, sort_keys=False, width=_COLUMNS - 16)
        yield from text.splitlines()


def _coloured(lines: list[_Line]) -> str:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    with console.capture() as capture:
        for line in lines:
            console.print(Text.assemble((line.label, "cyan"), (line.text, line.style)))
    return capture.get().rstrip("\n")
