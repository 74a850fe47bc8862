"""The training of these tests: small, and paced, so that runs that wait for an event leave the processors to others."""

from pathlib import Path
from typing import Any

import yaml

PACE = """\
import os, time

def rate(step, config):
    time.sleep(float(os.environ.get("PACE_S", "0.1")))
    return config.optimizer.lr
"""
CONFIG: dict[str, Any] = {
    # Masks of dropout would take half of the time of a step.
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "hidden_dropout": 0,
        "attention_dropout": 0,
    },
    "training": {
        "train_iters": 12,
        "seq_length": 32,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "device": "cpu",
        # A hundred by default, which would take a fifth of the time of a rank.
        "eval_iters": 0,
    },
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
    "logging": {"log_interval": 1},
    "hooks": {"lr_function": "pace:rate"},
    "job": {"code": ["pace.py"]},
}


def write_training(home: Path) -> None:
    """Write ``c.yaml``, whose steps take at least a tenth of a second: ``--env PACE_S=SECONDS`` sets another time."""
    (home / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    (home / "pace.py").write_text(PACE)
