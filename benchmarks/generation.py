"""Speed of greedy generation with a key and value cache, compared with transformers.

    python -m trainer kernels build                      # once
    OMP_NUM_THREADS=1 python -m benchmarks.generation --write

This takes ten minutes on an idle core. A quick check that everything works:

    OMP_NUM_THREADS=1 python -m benchmarks.generation --rounds 1 --new 16

Both programs generate in this process, in turn, with the same random weights in float32 on the CPU and the same prompts
of 256 tokens: contexts of 256 to 511 by default. The result is the most tokens per second of CPU time of --rounds
rounds. Texts that differ are an error, unless the two tokens are nearly equally likely, which is counted.
transformers generates with its default cache and attention kernels (sdpa).
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.generation.load import load_generation_model
from trainer.generation.model import GenerationModel
from trainer.generation.settings import GenerationSettings
from trainer.generation.source import ModelSource
from trainer.ops.build.build_settings import BuildSettings

RESULTS = Path(__file__).parent / "results"
PROMPT, VOCAB_SIZE, POSITIONS = 256, 8192, 1024
_SIZES = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": POSITIONS, "initializer_range": 0.08}
_LLAMA = {
    **_SIZES,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2, 8 layers of 512": (
        "gpt2",
        {"vocab_size": VOCAB_SIZE, "n_positions": POSITIONS, "n_embd": 512, "n_layer": 8, "n_head": 8}
        | {"initializer_range": 0.08},
    ),
    "Llama, 8 layers of 512": ("llama", _LLAMA),
    "Mixtral, 4 layers of 512, 8 experts": ("mixtral", {**_LLAMA, "num_hidden_layers": 4, "num_local_experts": 8}),
}
BATCHES = {"1 prompt": (0,), "8 prompts": (0,) * 8, "4 prompts of 256, 192, 128 and 64 tokens": (0, 64, 128, 192)}


@dataclass(frozen=True)
class Row:
    """Tokens per second of CPU time of one case.

    Attributes:
        near_ties: texts that differ from a pair of nearly equally likely tokens on.
    """

    model: str
    batch: str
    ours: float
    theirs: float
    near_ties: int

    def __str__(self) -> str:
        return (
            f"| {self.model} | {self.batch} | {self.ours:.1f} | {self.theirs:.1f} | {self.ours / self.theirs:.2f} | "
            f"{self.near_ties} |"
        )


def witness_of(model_type: str, keys: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **keys, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def prompts_of(shorter: Sequence[int]) -> list[list[int]]:
    """Random prompts of 256 tokens, each shortened by its entry of ``shorter``."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, VOCAB_SIZE, (PROMPT - less,), generator=generator).tolist() for less in shorter]


def by_transformers(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = torch.tensor(prompt), 1
    with torch.inference_mode():
        found = model.generate(
            tokens, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None
        )
    return list(found[:, longest:].tolist())


def by_us(model: GenerationModel, prompts: list[list[int]], new: int) -> list[list[int]]:
    settings = GenerationSettings(max_new_tokens=new, temperature=0)
    return [found.tokens for found in model.generate(prompts, settings)]


def cpu_seconds(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    begin = time.process_time()
    found = run()
    return time.process_time() - begin, found


def count_near_ties(model: Any, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]) -> int:
    """Number of texts that differ from a near tie on.

    Raises:
        AssertionError: a text differs at a token that is not.
    """
    count = 0
    for prompt, one, other in zip(prompts, ours, theirs, strict=True):
        place = next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        if place is None:
            continue
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([prompt + other[:place]])).logits[0, -1]
        gap = float(logits[other[place]] - logits[one[place]]) / float(logits.abs().max())
        assert abs(gap) < 1e-4, f"texts differ at token {place} of {len(other)}, where the logits differ by {gap}"
        count += 1
    return count


def measure(name: str, rounds: int, new: int) -> list[Row]:
    model_type, keys = MODELS[name]
    witness = witness_of(model_type, keys)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        witness.save_pretrained(folder)
        model = load_generation_model(ModelSource.open(Path(folder)), settings=BuildSettings.from_variables(os.environ))
        for batch, shorter in BATCHES.items():
            prompts = prompts_of(shorter)
            ours, theirs = [], []
            for _ in range(rounds):
                own_seconds, own = cpu_seconds(lambda: by_us(model, prompts, new))  # noqa: B023
                their_seconds, other = cpu_seconds(lambda: by_transformers(witness, prompts, new))  # noqa: B023
                ours.append(own_seconds)
                theirs.append(their_seconds)
            count = len(prompts) * new
            ties = count_near_ties(witness, prompts, own, other)
            rows.append(Row(name, batch, count / min(ours), count / min(theirs), ties))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Generation beside transformers, on the CPU.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new", type=int, default=PROMPT, help="new tokens per prompt")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--write", action="store_true", help="store the table in benchmarks/results")
    options = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    lines = [
        f"# Generation beside transformers, {today}",
        "",
        f"Greedy, float32, one thread, prompts of {PROMPT} tokens, {options.new} new tokens each: most tokens per",
        f"second of CPU time of {options.rounds} rounds, in turn. Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.platform()}, "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        "| model | prompts | ours, tokens per CPU s | transformers | ours / theirs | texts after a near tie |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[4:]), flush=True)
    for name in options.model or MODELS:
        lines += map(str, measure(name, options.rounds, options.new))
    if options.write:
        path = RESULTS / f"generation-{today}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
