"""A small training on two nodes of this machine, with a module of hooks that make faults."""

from pathlib import Path
from typing import Any

import yaml


def write_training(home: Path, faults: str, train_iters: int, sections: dict[str, Any]) -> Path:
    """Write the training and its module below ``home``; returns their folder, the working directory of a submission.

    Args:
        home: of the user.
        faults: text of the module ``faults``.
        train_iters: iterations of the training.
        sections: further sections of the config; values of ``job`` are added to those of the training.
    """
    job = {"nodes": 2, "code": ["faults.py"], **sections.get("job", {})}
    config = {
        "model": {
            "num_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 1,
            "hidden_dropout": 0,
            "attention_dropout": 0,
        },
        "training": {
            "train_iters": train_iters,
            "seq_length": 16,
            "global_batch_size": 4,
            "kernel_backend": "reference",
            # A hundred by default, as many as a long training.
            "eval_iters": 0,
        },
        "optimizer": {"lr": 1e-3},
        "data": {"mock_data": True},
        **sections,
        "job": job,
    }
    work = home / "work"
    work.mkdir()
    (work / "c.yaml").write_text(yaml.safe_dump(config))
    (work / "faults.py").write_text(faults)
    return work
