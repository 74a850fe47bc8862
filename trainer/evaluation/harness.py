"""A model in any layout as a model of lm-evaluation-harness. Needs the package lm-eval.

Interface: github.com/EleutherAI/lm-evaluation-harness, docs/model_guide.md. Scores and continuations are those of its
model ``hf``, with the same tokens and the same limits of length.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api import task as task_module
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from trainer.evaluation.encoding import Encoding
from trainer.evaluation.errors import EvaluationError
from trainer.evaluation.ranks import ModelRanks
from trainer.generation.settings import GenerationSettings

MAX_NEW_TOKENS = 256
"""New tokens of a task that names no number, as in the harness's model ``hf``."""
_SEED = 1234
_SAMPLING = ("temperature", "top_k", "top_p")


def evaluate_tasks(ranks: ModelRanks, encoding: Encoding, tasks: Any, limit: int | None) -> dict[str, dict[str, float]]:
    """Metrics of each task and group, by name: those of the harness, with the standard errors that need no resampling.

    Rank 0 only, while the other ranks follow.

    Args:
        ranks: the model.
        encoding: its tokenizers.
        tasks: what ``load_tasks`` has returned.
        limit: evaluate only the first ``limit`` items of each task.

    Raises:
        EvaluationError: a task asks for something that this model cannot do.
    """
    # Some tasks draw their examples or their order.
    random.seed(0)
    np.random.seed(_SEED)
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=_SEED)
    with _without_bars():
        found = evaluate(
            HarnessModel(ranks, encoding), tasks, limit=limit, bootstrap_iters=0, log_samples=False, verbosity="ERROR"
        )
    return {
        name: {_metric(key): float(value) for key, value in values.items() if isinstance(value, int | float)}
        for name, values in {**found["results"], **found.get("groups", {})}.items()
    }


@contextmanager
def _without_bars() -> Iterator[None]:
    """No bar per task, for which the harness has no switch: bars would run through the lines of a log."""

    def without_bar(items: Iterable[Any], **more: Any) -> Iterable[Any]:
        del more
        return items

    bar, task_module.tqdm = task_module.tqdm, without_bar
    try:
        yield
    finally:
        task_module.tqdm = bar


def _metric(key: str) -> str:
    """The harness's ``acc,none`` as ``acc``; a filter's name stays."""
    return key.removesuffix(",none")


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Answers the harness's requests with a model in any layout. Rank 0 only."""

    def __init__(self, ranks: ModelRanks, encoding: Encoding) -> None:
        """Take the model and its tokenizers."""
        super().__init__()
        self._ranks, self._encoding = ranks, encoding
        self._length = ranks.model.most_positions

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.prefix_token_id if self._encoding.bare.eod is None else self._encoding.bare.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        assert self._encoding.first_token is not None
        return self._encoding.first_token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """Tokens of a text, with those that the tokenizer puts around it unless ``add_special_tokens`` is False."""
        del more
        tokenizer = self._encoding.bare if add_special_tokens is False else self._encoding.around
        return tokenizer.encode(string)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether it is the greedy one. Without a bar."""
        del disable_tqdm
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **more: Any
    ) -> list[tuple[float, bool]]:
        del more
        rows = [(context + continuation)[-(self._length + 1) :] for _, context, continuation in requests]
        for row, (_, _, continuation) in zip(rows, requests, strict=True):
            if len(continuation) >= len(row):
                raise EvaluationError(
                    f"a task scores {len(continuation)} tokens at once, but the model has {self._length} positions; "
                    "leave the task out"
                )
        scores = self._ranks.score(rows)
        found = []
        for (values, greedy), (_, _, continuation) in zip(scores, requests, strict=True):
            count = len(continuation)
            found.append((float(values[-count:].sum()), bool(greedy[-count:].all())))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, in windows of the model's length, each token once."""
        del disable_tqdm
        windows, counts = [], []
        for request in requests:
            of_text = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._length,
                context_len=1,
            )
            own = [(None, *utils.make_disjoint_window(window)) for window in of_text]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuation of each context, up to one of the task's texts, the end of a document or the task's limit."""
        del disable_tqdm
        by_wishes: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_wishes.setdefault(repr(request.args[1]), []).append(number)
        found: dict[int, str] = {}
        for numbers in by_wishes.values():
            contexts = [requests[number].args[0] for number in numbers]
            found |= zip(numbers, self._continue(contexts, requests[numbers[0]].args[1]), strict=True)
        return [found[number] for number in range(len(requests))]

    def _continue(self, contexts: Sequence[str], wishes: dict[str, Any]) -> list[str]:
        values: dict[str, Any] = dict(normalize_gen_kwargs(wishes, MAX_NEW_TOKENS))
        stop = [text for text in handle_stop_sequences(values["until"], eos=None) if text]
        room = self._length - values["max_gen_toks"]
        if room < 1:
            raise EvaluationError(
                f"a task asks for {values['max_gen_toks']} new tokens, but the model has {self._length} positions; set "
                "max_gen_toks in the task's generation_kwargs"
            )
        settings = GenerationSettings(
            max_new_tokens=values["max_gen_toks"], temperature=0.0, stop_tokens=self._encoding.stop_tokens
        )
        if values.get("do_sample"):
            given = {name: values[name] for name in _SAMPLING if values.get(name) is not None}
            settings = replace(settings, **{"temperature": 1.0, **given})
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        texts = [self._encoding.bare.decode(tokens) for tokens in self._ranks.generate(prompts, settings, stop)]
        return [postprocess_generated_text(text, stop, None) for text in texts]
