"""Small task files of lm-evaluation-harness: choices, continuations and whole texts."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

ITEMS = 12


def write_tasks(folder: Path) -> list[str]:
    """Write three tasks with their items; returns the names of the files."""
    words = ("red", "green", "blue", "one two", "a  b", "don't", "42")
    lines = [
        {
            "question": f"item {number}: {words[number % 7]} and",
            "choices": [words[(number + step) % 7] for step in (1, 3, 4)],
            "answer": number % 3,
            "text": " ".join(words[(number * step) % 7] for step in range(1, 2 + number)),
        }
        for number in range(ITEMS)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
        "test_split": "test",
        "metadata": {"version": 1},
    }
    scored = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    exact = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    tasks = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": scored,
        },
        "continuations": {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 8, "do_sample": False},
            "metric_list": exact,
        },
        "texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "bits_per_byte")],
        },
    }
    for name, keys in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **keys}))
    return [str(folder / f"{name}.yaml") for name in tasks]
