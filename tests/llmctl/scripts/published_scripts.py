"""Scripts of the published forms, in published/, and the table of their flags in docs/guide/megatron-scripts.md.

    python -m tests.llmctl.scripts.published_scripts      writes the table

The scripts have the flags, launchers and shell of scripts in public repositories: one of GENIAC for Llama 3, GPT on
ABCI (Megatron-DeepSpeed-Ylab), BERT and T5 of Megatron-LM's examples, phase 1 of Tanuki (ucllm_nedo_prod), and TSUBAME
scripts of llm-jp's Megatron-LM. Paths and sizes are variables, so that --arg makes them small.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from llmctl.scripts.flag_meaning import status_of
from llmctl.scripts.import_script import flags_of

FOLDER = Path(__file__).parent / "published"
PAGE = Path(__file__).resolve().parents[3] / "docs/guide/megatron-scripts.md"
BEGIN, END = "<!-- flags -->", "<!-- end of flags -->"
NOW = datetime(2026, 1, 2, 3, 4, 5)
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.sh")))

SMALL = {
    **{"NUM_LAYERS": "2", "HIDDEN_SIZE": "32", "NUM_HEADS": "4", "NUM_KEY_VALUE_HEADS": "2", "FFN_HIDDEN_SIZE": "64"},
    **{"SEQ_LENGTH": "16", "DECODER_SEQ_LENGTH": "16", "KV_CHANNELS": "8", "TRAIN_STEPS": "10", "LR_DECAY_ITERS": "10"},
    **{"MICRO_BATCH_SIZE": "1", "GLOBAL_BATCH_SIZE": "2", "LR_WARMUP_STEPS": "2", "NUM_EXPERTS": "4"},
    **{"TENSOR_PARALLEL_SIZE": "1", "PIPELINE_PARALLEL_SIZE": "1", "CONTEXT_PARALLEL_SIZE": "1"},
}
"""Sizes of a training of ten steps."""
_TANUKI = {
    **{"num_layers": "2", "hidden_size": "32", "num_attn_heads": "4", "seq_len": "16", "global_batch_size": "2"},
    **{"mp_size": "1", "pp_size": "1", "train_tokens": "320", "train_samples": "40", "lr_warmup_tokens": "64"},
}
FP8 = ("geniac_llama3_8b", "tsubame_llama3_8b", "tsubame_mixtral_8x7b")
"""Scripts that ask for fp8; they are trained in bf16."""
_NEEDED = {"tanuki_phase1": {"input_tokenizer_file": "/data/tokenizer.model", "output_model_dir": "/data/model/"}}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.sh"


def given_to(name: str, *, is_small: bool = False) -> dict[str, str]:
    """Arguments given to a script with --arg."""
    text = path_of(name).read_text(encoding="utf-8")
    sizes = (_TANUKI if name == "tanuki_phase1" else SMALL) if is_small else {}
    sizes = {key: value for key, value in sizes.items() if re.search(rf"\b{key}\b", text)}
    return {**_NEEDED.get(name, {}), **sizes, **({"fp8": "bf16"} if name in FP8 else {})}


def statuses(name: str) -> dict[str, str]:
    """Flag -> meant, no effect or refused."""
    return {group.name: status_of(group) for group in flags_of(path_of(name), given_to(name), NOW)}


def table() -> list[str]:
    """Lines of both tables: numbers of each script, and every flag."""
    found = {name: statuses(name) for name in NAMES}
    lines = ["| script | flags | meant | no effect | refused |", "|---|---|---|---|---|"]
    for name, flags in found.items():
        numbers = [list(flags.values()).count(status) for status in ("meant", "no effect", "refused")]
        refused = ", ".join(f"`--{flag}`" for flag, status in flags.items() if status == "refused")
        last = f"{numbers[2]}: {refused}" if refused else "0"
        lines.append(f"| {name} | {len(flags)} | {numbers[0]} | {numbers[1]} | {last} |")
    lines += ["", f"| flag | {' | '.join(NAMES)} |", "|---" * (1 + len(NAMES)) + "|"]
    for flag in sorted({flag for flags in found.values() for flag in flags}):
        lines.append(f"| `--{flag}` | {' | '.join(found[name].get(flag, '') for name in NAMES)} |")
    return lines


def page_with_table() -> str:
    """The page with today's tables."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + "\n".join([BEGIN, "", *table(), "", END]) + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with_table(), encoding="utf-8")
