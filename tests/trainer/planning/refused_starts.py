"""Refused combinations of keys of the section checkpoint; see refused_combinations.py."""

from __future__ import annotations

from typing import Any

REFUSED_STARTS: list[tuple[dict[str, dict[str, Any]], str, str, dict[str, dict[str, Any]]]] = [
    (
        {"checkpoint": {"load": "/w/ck", "save": "/w/ck/", "finetune": True}},
        "checkpoint.save",
        "save elsewhere, such as in /w/ck-finetuned, or leave finetune out",
        {"checkpoint": {"load": "/w/ck", "save": "/w/ck-finetuned", "finetune": True}},
    ),
    (
        {"checkpoint": {"load": "/w/ck", "save": "/w/ck", "no_load_optim": True}},
        "checkpoint.save",
        "save elsewhere, such as in /w/ck-continued, or leave no_load_optim out",
        {"checkpoint": {"load": "/w/ck", "save": "/w/ck", "no_load_optim": False}},
    ),
    (
        {"checkpoint": {"load": "/w/ck", "save": "/w/./ck", "no_load_rng": True}},
        "checkpoint.save",
        "of which no_load_rng takes a part only",
        {"checkpoint": {"load": "/w/ck", "save": None, "no_load_rng": True}},
    ),
    (
        {"checkpoint": {"copy_interval": 20}},
        "checkpoint.copy_folder",
        "is not set, but copy_interval is 20",
        {"checkpoint": {"copy_interval": 20, "copy_folder": "/dev/shm"}},
    ),
    (
        {"checkpoint": {"copy_folder": "/dev/shm"}},
        "checkpoint.copy_interval",
        "is not set, but copy_folder is /dev/shm",
        {"checkpoint": {"copy_interval": 20, "copy_folder": "/dev/shm"}},
    ),
    (
        {"checkpoint": {"copy_interval": 20, "copy_folder": "scratch"}},
        "checkpoint.copy_folder",
        "scratch is not an absolute path",
        {"checkpoint": {"copy_interval": 20, "copy_folder": "/scratch"}},
    ),
    (
        {"checkpoint": {"copy_interval": 20, "copy_folder": "/w/ck/copies", "save": "/w/ck/"}},
        "checkpoint.copy_folder",
        "/w/ck/copies is in checkpoint.save /w/ck/, which the nodes share",
        {"checkpoint": {"copy_interval": 20, "copy_folder": "/w/ck-copies", "save": "/w/ck/"}},
    ),
    (
        {"training": {"on_loss_spike": "roll_back"}},
        "training.on_loss_spike",
        "set checkpoint.save_interval, or use skip",
        {"training": {"on_loss_spike": "roll_back"}, "checkpoint": {"save_interval": 100}},
    ),
]
