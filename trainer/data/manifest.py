"""``<prefix>.json`` beside a .bin/.idx pair: which tokenizer made the tokens, and how many there are.

Megatron-LM's index stores neither, so that training with another vocabulary than the data's goes unnoticed there.
Readers that do not know the file pass it by.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from trainer.data.errors import DataError
from trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Manifest:
    """What is known of a prepared pair. The same input gives the same bytes: no time, host or path stands in it."""

    tokenizer_sha256: str
    vocab_size: int
    eod: int | None
    """Id of the token that ends each document; None if none was appended."""
    documents: int
    sequences: int
    tokens: int
    largest_token: int
    """The largest id that occurs; -1 if there are no tokens."""
    text_bytes: int
    """UTF-8 bytes of the text that the tokens were made of."""
    schema: int = 1

    def write(self, prefix: Path) -> None:
        """Write ``<prefix>.json`` by a rename, so that nobody ever reads half of it."""
        path = manifest_path(prefix)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        partial.replace(path)

    def check_tokenizer(self, prefix: Path, tokenizer: Tokenizer, name: str) -> None:
        """Refuse a tokenizer other than the one that made the tokens.

        Raises:
            DataError: the fingerprints differ; names the data, the tokenizer ``name`` and both fingerprints.
        """
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise DataError(
                f"{prefix}: was tokenized with another tokenizer (sha256 {self.tokenizer_sha256[:12]}, "
                f"{self.vocab_size} tokens) than {name} ({tokenizer.sha256[:12]}, {tokenizer.vocab_size} tokens); set "
                "data.tokenizer_model to the first, or prepare the data again"
            )


def manifest_path(prefix: Path) -> Path:
    """Where the manifest of ``prefix`` lies."""
    return prefix.with_name(prefix.name + ".json")


def read_manifest(prefix: Path) -> Manifest | None:
    """The manifest of ``prefix``; None where there is none, as with data that Megatron-LM prepared.

    Raises:
        DataError: it cannot be read or is no manifest.
    """
    path = manifest_path(prefix)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a manifest: {error}") from None
    names = {field.name for field in fields(Manifest)}
    if not isinstance(values, dict) or values.get("schema") != 1 or set(values) != names:
        raise DataError(f"{path}: is not a manifest of schema 1; move it away if it is something else's")
    return Manifest(**values)
