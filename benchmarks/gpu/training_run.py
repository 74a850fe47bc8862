"""A training run of the trainer itself on one GPU, saved and resumed, as lines of JSON.

    python -m benchmarks.gpu.training_run [--device cpu]

Trains twelve steps with deterministic kernels, and saves after six of them, beside the next one. A new process goes on
from that checkpoint. The losses must be the same to the bit. Exit code 1 if they are not.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer.checkpoint.directory import LATEST, checkpoint_path

STEPS, HALF = 12, 6
# A Llama of 0.3B parameters; for a CPU one of 0.1M.
SIZES = {
    "cuda": {
        "num_layers": 16,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "ffn_hidden_size": 2816,
        "seq_length": 2048,
    },
    "cpu": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "seq_length": 64},
}


def train(folder: Path, device: str, iterations: int) -> tuple[list[dict[str, Any]], str]:
    """Rows of metrics.jsonl, and the output, of a run in ``folder`` that goes on to ``iterations``.

    Raises:
        SystemExit: training failed; the message has the end of its output.
    """
    folder.mkdir(exist_ok=True)
    options = {
        **SIZES[device],
        "vocab_size": 32000 if device == "cuda" else 512,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "train_iters": iterations,
        "lr": 3e-4,
        "lr_decay_style": "constant",
        "device": device,
        "save": str(folder / "checkpoints"),
        "load": str(folder / "checkpoints"),
        "save_interval": HALF,
        "log_interval": 1,
    }
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    switches = ("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--bf16", "--mock-data")
    switches += ("--deterministic-mode", "--async-save")
    argv = [sys.executable, "-m", "trainer", "pretrain", *flags, *switches]
    environment = os.environ | {"LLMCTL_RUN_DIR": str(folder)}
    done = subprocess.run(
        argv, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise SystemExit(f"training ended with {done.returncode}:\n{done.stdout[-6000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "lm_loss" in row], done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        whole, output = train(Path(name, "whole"), flags.device, STEPS)
        print(output, file=sys.stderr)
        saved, second = Path(name, "whole/checkpoints"), Path(name, "second/checkpoints")
        shutil.copytree(checkpoint_path(saved, HALF), checkpoint_path(second, HALF))
        (second / LATEST).write_text(f"{HALF}\n")
        resumed, _ = train(second.parent, flags.device, STEPS)
    losses = [[row["lm_loss"] for row in rows] for rows in (whole, resumed)]
    same = losses[0][HALF:] == losses[1] and len(losses[0]) == STEPS
    print(
        json.dumps({"what": "training run", "losses": losses[0], "resumed": losses[1], "same": same, "last": whole[-1]})
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
