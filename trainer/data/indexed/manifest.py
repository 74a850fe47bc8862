"""``<prefix>.json`` beside a .bin/.idx pair: which tokenizer made the tokens, how many there are, and checksums.

Megatron-LM's index stores none of it, so that training with another vocabulary than the data's goes unnoticed there.
Readers that do not know the file pass it by.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.errors import DataError

if TYPE_CHECKING:
    from trainer.data.indexed.indexed_dataset import IndexedDataset
    from trainer.data.tokenizers.tokenizer import Tokenizer

_ADDED_IN_2 = ("bin_sha256", "idx_sha256")


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
    bin_sha256: str | None = None
    """SHA-256 of the .bin, in hexadecimal; None in manifests of schema 1."""
    idx_sha256: str | None = None
    """SHA-256 of the .idx."""
    schema: int = 2

    def write(self, prefix: Path) -> None:
        """Write ``<prefix>.json`` by a rename, so that nobody ever reads half of it.

        Raises:
            OSError: it cannot be written; what was there before still is.
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
        """Refuse a tokenizer other than the one that made the tokens.

        Raises:
            DataError: the fingerprints differ; names the data, the tokenizer ``name`` and both fingerprints.
        """
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise DataError(
                f"{prefix}: was tokenized with another tokenizer (sha256 {self.tokenizer_sha256[:12]}, "
                f"{self.vocab_size} tokens) than {name} ({tokenizer.sha256[:12]}, {tokenizer.vocab_size} tokens); set "
                "data.tokenizer_model to the first, tiktoken_pattern, tiktoken_num_special_tokens and "
                "tokenizer_hf_include_special_tokens to what they were, or prepare the data again"
            )

    def check_end(self, prefix: Path, tokenizer: Tokenizer, name: str) -> None:
        """Refuse a tokenizer that names another token as the end of a document than the one that was appended.

        Fingerprints leave out which token that is.

        Raises:
            DataError: they differ.
        """
        if self.eod is not None and tokenizer.eod is not None and tokenizer.eod != self.eod:
            raise DataError(
                f"{prefix}: its documents end with token {self.eod}, and {name} ends them with {tokenizer.eod}; set "
                "data.eod_token to the former's text, or prepare the data again"
            )

    def check_counts(self, tokens: IndexedDataset) -> None:
        """Refuse a pair that is not the one that was described. Costs nothing: the tokens are not read.

        Raises:
            DataError: documents, sequences or tokens are other numbers.
        """
        found = {"documents": tokens.document_count, "sequences": len(tokens), "tokens": tokens.token_count}
        wrong = [
            f"{getattr(self, name):,} {name} (there are {n:,})" for name, n in found.items() if n != getattr(self, name)
        ]
        if wrong:
            path = manifest_path(tokens.prefix)
            raise DataError(
                f"{path}: tells of {' and '.join(wrong)}: it belongs to other data; move it away, or prepare the data "
                "again"
            )


def manifest_path(prefix: Path) -> Path:
    """Where the manifest of ``prefix`` lies."""
    return Path(f"{prefix}.json")


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
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as a manifest: {error}") from None
    if not isinstance(values, dict) or not _is_manifest(values):
        raise DataError(f"{path}: is not a manifest of schema 1 or 2; move it away if it is something else's")
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
