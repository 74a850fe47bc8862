"""Prompts of a command line: texts and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from trainer.generation.errors import GenerationError


def read_prompts(texts: Sequence[str], file: str | None) -> list[str]:
    """The prompts of ``texts``, then those of ``file``: one per line; of a .jsonl file the key ``prompt`` of each line.

    Raises:
        GenerationError: the file cannot be read, or has no prompts.
    """
    if file is None:
        return list(texts)
    path = Path(file).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise GenerationError(f"--prompt-file: {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise GenerationError(f"--prompt-file: {path} is not UTF-8; convert it") from None
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise GenerationError(f"--prompt-file: {path} has no prompts; write one per line")
    if path.suffix == ".jsonl":
        lines = [_prompt_of(path, line) for line in lines]
    return [*texts, *lines]


def _prompt_of(path: Path, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise GenerationError(f'--prompt-file: {path} holds the line {line[:60]!r}, which is not {{"prompt": TEXT}}')
    return prompt
