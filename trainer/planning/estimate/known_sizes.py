"""Size of the vocabulary and of the data, by the files that a config names. Torch-free; nothing is decoded.

The trainer decides by the same rule (trainer.data.samples.sources.vocabulary); here a file that cannot be read gives
no size.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.formats.indexed_data import DTYPES, HEADER, MAGIC, IndexHeader
from trainer.config.train_config import TrainConfig
from trainer.planning.preflight.tokenizer_file import TokenizerError, named_size

if TYPE_CHECKING:
    from trainer.planning.start_model import Files


GENERATED_TOKENS = 256
"""Of generated data without model.vocab_size; trainer.data.samples.mock has the same number."""


@dataclass(frozen=True)
class DatasetSize:
    """Size of a run's indexed data.

    Attributes:
        tokens: of all datasets that the run trains on, before they are divided; None: unknown.
        vocabulary: largest vocabulary of their manifests; None without manifests.
    """

    tokens: int | None
    vocabulary: int | None


def dataset_size(config: TrainConfig, files: "Files") -> DatasetSize:
    """Tokens and vocabulary of the indexed datasets that a run trains on."""
    if config.data.streaming or config.data.mock_data:
        return DatasetSize(None, None)
    prefixes = [prefix for key, prefix in config.data_prefixes() if key in ("data.data_path", "data.train_data_path")]
    manifests = [_manifest(files, prefix) for prefix in prefixes]
    counts = [
        manifest.get("tokens") if manifest else _indexed_tokens(files, prefix)
        for prefix, manifest in zip(prefixes, manifests, strict=True)
    ]
    known = [count for count in counts if isinstance(count, int)]
    sizes = [size for manifest in manifests if isinstance(size := manifest.get("vocab_size"), int)]
    return DatasetSize(sum(known) if known and len(known) == len(counts) else None, max(sizes, default=None))


def vocabulary_of(config: TrainConfig, data: DatasetSize, files: "Files") -> int | None:
    """Token ids of the run, without padding; None: no file says the number.

    Args:
        config: of the run.
        data: size of its datasets.
        files: of the machine that has them.
    """
    by_numbers = config.data.tokenizer_type == "NullTokenizer"
    if config.model.vocab_size is not None:
        return config.model.vocab_size + by_numbers
    if config.data.mock_data:
        return GENERATED_TOKENS
    sizes = [size for size in (data.vocabulary, tokenizer_size(config, files)) if size is not None]
    return max(sizes, default=None)


def tokenizer_size(config: TrainConfig, files: "Files") -> int | None:
    """Token ids of the tokenizer that a config names, with those that the config adds; None: unknown."""
    try:
        return named_size(config.data, files)
    except TokenizerError:
        return None


def _manifest(files: "Files", prefix: str) -> dict[str, Any]:
    """The manifest of a dataset that ``llmctl data prepare`` wrote; empty for others."""
    try:
        values = json.loads(files.read(f"{prefix}.json") or b"{}")
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _indexed_tokens(files: "Files", prefix: str) -> int | None:
    """Tokens of a dataset without a manifest, by its index: its last sequence ends the .bin."""
    head = files.read(f"{prefix}.idx", 0, HEADER.size) or b""
    if len(head) < HEADER.size:
        return None
    magic, _, code, sequences, _ = HEADER.unpack(head)
    if magic != MAGIC or code not in DTYPES or not sequences:
        return None
    header = IndexHeader(DTYPES[code], sequences, 0)
    last_length = files.read(f"{prefix}.idx", header.pointers - 4, 4) or b""
    last_offset = files.read(f"{prefix}.idx", header.documents - 8, 8) or b""
    if len(last_length) < 4 or len(last_offset) < 8:
        return None
    return int.from_bytes(last_offset, "little") // header.token_bytes + int.from_bytes(last_length, "little")
