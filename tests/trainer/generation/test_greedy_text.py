"""Greedy text equals that of transformers, token for token, for rows of unequal lengths and in every layout.

40 s on one core, of which transformers' import and the ranks' start are half.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.families.proofs import record
from tests.trainer.families.published_models import published, save
from tests.trainer.spawn import Ranks
from trainer.config.sections.parallel import ParallelConfig
from trainer.families.catalogue import FAMILIES
from trainer.generation.load import load_generation_model
from trainer.generation.model import padded
from trainer.generation.settings import GenerationSettings
from trainer.generation.source import ModelSource
from trainer.model.cache import KeyValueCache
from trainer.pipeline.executor import forward_next
from trainer.process.launch_environment import LaunchEnvironment

RANKS = 2

pytest.importorskip("transformers")

NEW = 14
GREEDY = GenerationSettings(max_new_tokens=NEW, temperature=0)
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DECODERS = {family.name: family for family in FAMILIES if family.auto_class == "AutoModelForCausalLM"}
# Learned positions with and without an offset; grouped queries; query-key norms; windows of 8 tokens beside whole
# layers; experts; latent attention; sinks; ALiBi.
DIVIDED = ("GPT-2", "OPT", "BLOOM", "Llama", "Qwen3", "Gemma 3", "Mixtral", "DeepSeek-V3", "gpt-oss")


def prompts_of(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in (30, 3, 17)]


def by_transformers(witness: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """New tokens, and the logits [N, V] that each was chosen from."""
    found = witness.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits).float()


def on_a_rank(rank: int, world_size: int, folder: Path, layout: dict[str, int]) -> tuple[list[list[int]], list[float]]:
    launch = LaunchEnvironment(rank, rank, world_size, world_size)
    model = load_generation_model(ModelSource.open(folder), ParallelConfig(**layout), launch=launch)
    prompts = prompts_of(model.vocab_size)
    scores = model.score(prompts)
    return [found.tokens for found in model.generate(prompts, GREEDY)], scores[0].log_likelihoods.tolist()


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_text_equals_that_of_transformers(name: str, ranks: Ranks, tmp_path: Path) -> None:
    witness = published(DECODERS[name])
    folder = save(witness, tmp_path / "weights")
    model = load_generation_model(ModelSource.open(folder))
    prompts = prompts_of(model.vocab_size)
    theirs, their_logits = zip(*(by_transformers(witness, prompt) for prompt in prompts), strict=True)
    assert [found.tokens for found in model.generate(prompts, GREEDY)] == list(theirs)
    assert [model.generate([prompt], GREEDY)[0].tokens for prompt in prompts] == list(theirs)
    logits = torch.stack(logits_along(model, prompts, theirs), dim=1)  # [B, N, V]
    expected = torch.stack(their_logits)
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4
    scores = model.score(prompts)[0].log_likelihoods
    with torch.no_grad():
        whole = witness(torch.tensor(prompts[:1])).logits[0, :-1].float().log_softmax(-1)
    assert scores == pytest.approx(whole.gather(-1, torch.tensor(prompts[0][1:])[:, None])[:, 0], abs=1e-3)
    for layout in (TP2, PP2, *([EP2] if name == "Mixtral" else [])) if name in DIVIDED else ():
        for tokens, divided_scores in ranks.run(on_a_rank, folder, layout):
            assert tokens == list(theirs)
            assert divided_scores == pytest.approx(scores.tolist(), abs=1e-3)
    record(name, "text")


def logits_along(model: Any, prompts: list[list[int]], texts: Any) -> list[torch.Tensor]:
    """Logits [B, V] of each step, along given texts."""
    cache = KeyValueCache([len(prompt) for prompt in prompts], 60, model.device)
    tokens, found = padded(prompts), []
    for step in range(NEW):
        logits = forward_next(model.model, tokens, cache)
        found.append(logits.clone())
        tokens = torch.tensor([text[step] for text in texts])[:, None]
    return found
