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
]
