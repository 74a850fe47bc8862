"""One example of each hook; hooks.yaml names them. docs/guide/hooks.md describes them."""

import json
import math
import os
from pathlib import Path

import numpy as np
import torch.nn.functional as F


class Progressions:
    """Sequences that go up in equal steps, modulo the vocabulary. The first two tokens, a prompt, do not count."""

    def __init__(self, items, first, config):
        self.items, self.first = items, first
        self.length, self.size = config.training.seq_length, config.model.vocab_size
        self.counts = np.arange(1, self.length + 1) >= 2

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        random = np.random.default_rng(self.first + index)
        start, step = random.integers(self.size), random.integers(1, 8)
        return (start + step * np.arange(self.length + 1)) % self.size, self.counts


class Letters:
    """One token per byte of a text, folded to lower case."""

    vocab_size, eod = 250, 249

    def encode(self, text):
        """Tokens of a text."""
        return [min(byte, 248) for byte in text.lower().encode()]

    def decode(self, tokens):
        """Text of tokens."""
        return bytes(tokens).decode(errors="replace")


def dataset(split, config):
    """Other sequences for training than for validation."""
    return Progressions(20, 0, config) if split == "train" else Progressions(8, 1000, config)


def smoothed(logits, labels, config):
    """Cross entropy with label smoothing."""
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=config.hooks.settings["smoothing"])


def schedule(step, config):
    """Linear warmup, then a decay with the square root of the step."""
    warmup = config.hooks.settings["warmup_steps"]
    return config.optimizer.lr * min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


def token_zero_share(facts):
    """Share of the labels that are token 0, over the global batch."""
    labels = [batch.labels for batch in facts.micro_batches]
    return sum(int((one == 0).sum()) for one in labels), sum(one.numel() for one in labels)


def stop_at_high_loss(facts):
    """End the run as failed once the loss is above a limit."""
    loss, limit = facts.losses["lm_loss"], facts.config.hooks.settings["highest_loss"]
    if loss is not None and loss > limit:
        raise ValueError(f"the loss {loss:.4f} of iteration {facts.iteration} is above {limit}")


def note_checkpoint(facts):
    """Append a line about the checkpoint to a file in the run directory."""
    folder = os.environ.get("LLMCTL_RUN_DIR")
    if facts.mesh.rank == 0 and folder:
        with (Path(folder) / "saved.jsonl").open("a") as file:
            print(json.dumps({"iteration": facts.iteration, "loss": facts.losses["lm_loss"]}), file=file)
