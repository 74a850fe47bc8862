"""Parser of Megatron-LM's notation for stage layouts, as in ``Et*3|(tt|)*29|L``. Torch-free.

E is the embedding, t a transformer layer, m a layer of multi-token prediction, L the LM head with the loss; ``|`` ends
a virtual stage, ``x*n`` and ``(...)*n`` repeat, commas and blanks are ignored. The stages are in the order of the
forward pass: with several virtual stages per rank first the first virtual stage of every rank, then the second
(Megatron-LM, --pipeline-model-parallel-layout). In a V (zb-v) the second half runs from the last rank back to the
first.
"""

from __future__ import annotations

import re

from trainer.config.errors import ConfigError

KEY = "parallel.pipeline_model_parallel_layout"
MAX_SYMBOLS = 100_000
"""Limit on the expanded length of a layout; a larger repetition is a typo."""

_TOKEN = re.compile(r"\*(\d+)|[EtmL|()]|.")


def parse_stage_layout(text: str) -> tuple[range, ...]:
    """Layer numbers of every virtual stage that ``text`` describes.

    Raises:
        ConfigError: ``text`` is malformed, or embedding and loss are not at its ends.
    """
    stages = "".join(_expand(text)).split("|")
    for number, stage in enumerate(stages):
        expected = ("E" if number == 0 else "") + "t" * stage.count("t")
        if number == len(stages) - 1:
            expected += "m" * stage.count("m") + "L"
        if stage != expected:
            raise ConfigError(
                KEY,
                f"virtual stage {number} is {stage!r}, but only the first of the {len(stages)} stages begins with E, "
                "only the last ends with L or with m (multi-token prediction) and L, and all others contain only "
                "layers (t)",
            )
    layers: list[range] = []
    for stage in stages:
        start = layers[-1].stop if layers else 0
        layers.append(range(start, start + stage.count("t")))
    return tuple(layers)


def count_prediction_layers(text: str) -> int:
    """Number of layers of multi-token prediction in a layout that ``parse_stage_layout`` accepts."""
    return "".join(_expand(text)).count("m")


def _expand(text: str) -> list[str]:
    """Symbols of ``text`` with all repetitions expanded."""
    # One list per open parenthesis; a * repeats the last element.
    open_groups: list[list[str]] = [[]]
    for match in _TOKEN.finditer(re.sub(r"[,\s]", "", text)):
        token, count = match.group(0), match.group(1)
        if token in "EtmL|":
            open_groups[-1].append(token)
        elif token == "(":
            open_groups.append([])
        elif token == ")" and len(open_groups) > 1:
            group = open_groups.pop()
            open_groups[-1].append("".join(group))
        elif count is not None and open_groups[-1]:
            open_groups[-1][-1] = _repeat(text, open_groups[-1][-1], int(count))
        else:
            what = "closes nothing" if token == ")" else "repeats nothing" if count is not None else "means nothing"
            raise ConfigError(KEY, f"{text!r}: {token!r} {what}; use E, t, L, | and repetition, as in Et*3|(tt|)*2t*3L")
    if len(open_groups) > 1:
        raise ConfigError(KEY, f"{text!r}: a parenthesis is not closed")
    return open_groups[0]


def _repeat(text: str, symbols: str, count: int) -> str:
    if len(symbols) * count > MAX_SYMBOLS:
        raise ConfigError(KEY, f"{text!r}: *{count} makes more than {MAX_SYMBOLS} layers and stages")
    return symbols * count
