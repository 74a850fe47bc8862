"""The fastest layouts of three models on 8 to 16,384 H100, on paper.

    python -m benchmarks.planner_paper [--to PAGE]

Each row is the first of ``llmctl plan --search``: nothing is run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config
from trainer.planning.estimate.devices import DEVICES, GIB
from trainer.planning.estimate.plan import RunPlan
from trainer.planning.estimate.search import search_layouts

PER_NODE = 8
SIZES = {8: 2**22, 64: 2**22, 512: 2**22, 2048: 2**24, 16384: 2**26}
"""Devices -> tokens of a step."""
PAGE = """# Three models on paper

`python -m benchmarks.planner_paper --to PAGE` makes this page. Each row is the first layout of `llmctl plan
--search` on H100 with 8 devices on a node, NVLink within and 400 Gb/s for each device between nodes; bf16,
sequences of 8192 tokens (8x22B: 4096). Nothing was run. The [published runs](planner_rows.md) that predictions
were compared with reach 6,144 devices; what stands beyond is arithmetic. Failures, slow ranks and the shape of
the network, which decide on a job of 16,384 devices, are not in it. The time of the search is that of one core.

"""


@dataclass(frozen=True)
class PaperModel:
    """A model by its shape."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    length: int
    experts: int = 0

    def config(self, tokens: int) -> TrainConfig:
        """A training with ``tokens`` tokens a step."""
        experts = {"num_experts": self.experts, "moe_router_topk": 2} if self.experts else {}
        return build_config(
            {
                "model": {
                    "num_layers": self.layers,
                    "hidden_size": self.hidden,
                    "ffn_hidden_size": self.ffn,
                    "num_attention_heads": self.heads,
                    "group_query_attention": True,
                    "num_query_groups": self.groups,
                    "swiglu": True,
                    "normalization": "RMSNorm",
                    "disable_bias_linear": True,
                    "position_embedding_type": "rope",
                    "untie_embeddings_and_output_weights": True,
                    "attention_dropout": 0.0,
                    "hidden_dropout": 0.0,
                    **experts,
                },
                "training": {
                    "train_iters": 1,
                    "seq_length": self.length,
                    "global_batch_size": tokens // self.length,
                    "bf16": True,
                },
                "optimizer": {"lr": 1e-4},
            }
        )


MODELS = {
    "Llama 3 8B": PaperModel(32, 4096, 14336, 32, 8, 128256, 8192),
    "Llama 3 70B": PaperModel(80, 8192, 28672, 64, 8, 128256, 8192),
    "Mixtral 8x22B": PaperModel(56, 6144, 16384, 48, 8, 32000, 4096, experts=8),
}


def main() -> None:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="write this page")
    options = parser.parse_args()
    lines = []
    for line in table_lines():
        print(line, flush=True)
        lines.append(line)
    if options.to is not None:
        options.to.write_text(PAGE + "\n".join(lines) + "\n", encoding="utf-8")


def table_lines() -> Iterator[str]:
    """A line for each model and number of devices."""
    head = (
        "model | H100 | tokens a step | layout | step s | tokens/s each | MFU | GiB | of the step | layouts | search s"
    )
    yield f"| {head} |"
    yield "|---" * 11 + "|"
    for name in MODELS:
        for devices in SIZES:
            yield row_line(name, devices)


def row_line(name: str, devices: int) -> str:
    """The line of a model on a number of devices."""
    model, tokens, began = MODELS[name], SIZES[devices], time.process_time()
    found = search_layouts(model.config(tokens), model.vocabulary, DEVICES["H100"], devices // PER_NODE, PER_NODE)
    took = time.process_time() - began
    shown = [name, f"{devices:,}", f"{tokens // 2**20} Mi"]
    if found.found:
        best = found.found[0]
        shown += [str(best.candidate), *_numbers(best.plan)]
    else:
        needs = "" if found.nearest is None else f"needs {found.nearest.bytes / GIB:.0f} GiB"
        shown += ["none fits", "", "", "", needs, ""]
    return f"| {' | '.join([*shown, f'{found.layouts:,}', f'{took:.1f}'])} |"


def _numbers(plan: RunPlan) -> list[str]:
    named = sorted(plan.limits.items(), key=lambda each: -each[1])
    limits = ", ".join(f"{key.replace('_', ' ')} {100 * share:.0f}%" for key, share in named if share >= 0.01)
    peak = f"{plan.worst.total / GIB:.0f}{' tight' if plan.is_tight else ''}"
    return [f"{plan.step.total:.3g}", f"{plan.tokens_per_s:,.0f}", f"{100 * plan.utilization[0]:.0f}%", peak, limits]


if __name__ == "__main__":
    main()
