"""Manifest ``<prefix>.json`` of an indexed dataset: tokenizer, counts and checksums.

Megatron-LM's index has none of these, so that training with another vocabulary than the data's would go unnoticed.
Other readers ignore the file.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.formats.indexed_data import FormatError, check_counts
from trainer.data.errors import DataError

if TYPE_CHECKING:
    from trainer.data.indexed.indexed_dataset import IndexedDataset
    from trainer.data.tokenizers.tokenizer import Tokenizer

_ADDED_IN_2 = ("bin_sha256", "idx_sha256")


@dataclass(frozen=True)
class Manifest:
    """Facts about a prepared dataset. Deterministic: contains no time, host or path."""

    tokenizer_sha256: str
    vocab_size: int
    eod: int | None
    """Id of the token that ends each document; None if no token was appended."""
    documents: int
    sequences: int
    tokens: int
    largest_token: int
    """Largest token id; -1 without tokens."""
    text_bytes: int
    """UTF-8 bytes of the tokenized text."""
    bin_sha256: str | None = None
    """SHA-256 of the .bin, in hexadecimal; None in manifests of schema 1."""
    idx_sha256: str | None = None
    """SHA-256 of the .idx."""
    schema: int = 2

    def write(self, prefix: Path) -> None:
        """Write ``<prefix>.json`` atomically.

        Raises:
            OSError: the file cannot be written; an earlier manifest stays unchanged.
        """
        path = manifest_path(prefix)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self), indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def check_tokenizer(self, prefix: Path, tokenizer: Tokenizer, name: str) -> None:
        """Refuse a tokenizer that differs from the data's.

        Raises:
            DataError: the checksums differ; names the data, the tokenizer ``name`` and both checksums.
        """
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise DataError(
                f"{prefix}: was tokenized with another tokenizer (sha256 {self.tokenizer_sha256[:12]}, "
                f"{self.vocab_size} tokens) than {name} ({tokenizer.sha256[:12]}, {tokenizer.vocab_size} tokens); use "
                "the data's tokenizer and its tiktoken_pattern, tiktoken_num_special_tokens and "
                "tokenizer_hf_include_special_tokens, or prepare the data again"
            )

    def check_end(self, prefix: Path, tokenizer: Tokenizer, name: str) -> None:
        """Refuse a tokenizer whose end-of-document token differs from the data's.

        The checksum of a tokenizer does not cover this token.

        Raises:
            DataError: the tokens differ.
        """
        eod = tokenizer.eod
        if None not in (self.eod, eod) and eod != self.eod:
            raise DataError(
                f"{prefix}: documents end with token {self.eod}, but {name} ends them with {eod}; set "
                f"data.eod_token to the text of token {self.eod}, or prepare the data again"
            )

    def check_counts(self, tokens: IndexedDataset) -> None:
        """Refuse a dataset that does not match the manifest's counts.

        The tokens are not read.

        Raises:
            DataError: the number of documents, sequences or tokens differs.
        """
        found = {
            "documents": tokens.document_count,
            "sequences": len(tokens.sequence_lengths),
            "tokens": tokens.token_count,
        }
        stated = {name: getattr(self, name) for name in found}
        try:
            check_counts(manifest_path(tokens.prefix), stated, found)
        except FormatError as error:
            raise DataError(str(error)) from None


def manifest_path(prefix: Path) -> Path:
    """Path of the manifest of ``prefix``."""
    return Path(f"{prefix}.json")


def read_manifest(prefix: Path) -> Manifest | None:
    """Read the manifest of ``prefix``; None: no manifest, as for data prepared by Megatron-LM.

    Raises:
        DataError: the file cannot be read or is not a manifest.
    """
    path = manifest_path(prefix)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as a manifest: {error}") from None
    if not isinstance(values, dict) or not _is_manifest(values):
        raise DataError(f"{path}: is not a manifest of schema 1 or 2; move the file away, or prepare the data again")
    return Manifest(**values)


def _is_manifest(values: dict[str, Any]) -> bool:
    names = {field.name for field in fields(Manifest)}
    if values.get("schema") == 1:
        names -= set(_ADDED_IN_2)
    elif values.get("schema") != 2:
        return False
    texts = {"tokenizer_sha256", *_ADDED_IN_2}
    optional = {"eod", *_ADDED_IN_2}
    return set(values) == names and all(
        isinstance(value, str if name in texts else int) or (value is None and name in optional)
        for name, value in values.items()
    )
