"""Weights of a Hugging Face folder that a run would start from: absent, cut, or quantized in a way that is not read.

By names, sizes and headers; no weight is read. Torch-free. Of safetensors files:
https://huggingface.co/docs/safetensors (8 bytes with the length of a JSON header, the header, the tensors).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainer.config.foreign_formats import HUB_CONFIG
from trainer.families.format.quantization import CONFIG_KEY, quantization_problem
from trainer.planning.preflight.datasets import Part, Read, Reader

_SINGLES = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _SINGLES)
_LONGEST_JSON = 100 << 20
"""Of a header by the format's own rule; taken for an index too."""
_LENGTH = 8
"""Bytes of a header's length."""


def weights_problem(path: str, names: Collection[str], read: Reader) -> str | None:
    """Words on the first reason why the weights cannot be read, or None. Up to three round trips.

    Args:
        path: the folder, which has a config.json.
        names: of everything in the folder.
        read: reads the files as the job sees them.
    """
    index = None if _SINGLES[0] in names else next((name for name in _INDEXES if name in names), None)
    single = next((name for name in _SINGLES if name in names), None)
    wanted = [Read(f"{path}/{HUB_CONFIG}", 0, _LONGEST_JSON)]
    wanted += [Read(f"{path}/{index}", 0, _LONGEST_JSON)] if index is not None else []
    config, *rest = [_values(part) for part in read(wanted)]
    if CONFIG_KEY in config and (problem := quantization_problem(config[CONFIG_KEY])) is not None:
        return f"{path}: {problem}"
    if index is None and single is None:
        return (
            f"{path}: has {HUB_CONFIG}, but no weights: {_SINGLES[0]}, or {_INDEXES[0]} with its files; download them"
        )
    if index is None:
        return _cut(path, [single or ""], read)
    weight_map = rest[0].get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        return f"{path}/{index}: has no weight_map; download the file again"
    files = sorted({str(file) for file in weight_map.values()})
    absent = [file for file in files if file not in names]
    if absent:
        return (
            f"{path}: {len(absent)} of the {len(files)} files that {index} names are missing, {absent[0]} first; "
            "download them"
        )
    return _cut(path, files, read)


def _cut(path: str, files: Sequence[str], read: Reader) -> str | None:
    """Words on the first safetensors file that is shorter than its header says. Two round trips."""
    files = [file for file in files if file.endswith(".safetensors")]
    lengths = []
    for file, part in zip(
        files, read([Read(f"{path}/{file}", 0, _LENGTH) for file in files]) if files else (), strict=True
    ):
        length = int.from_bytes(part.data, "little") if part is not None else 0
        if part is None or not 0 < length <= min(_LONGEST_JSON, part.size):
            return f"{path}/{file}: is cut or not a safetensors file; download it again"
        lengths.append(length)
    wanted = [Read(f"{path}/{file}", _LENGTH, length) for file, length in zip(files, lengths, strict=True)]
    for file, length, part in zip(files, lengths, read(wanted) if wanted else (), strict=True):
        ends = [
            entry["data_offsets"][1]
            for entry in _values(part).values()
            if isinstance(entry, dict) and "data_offsets" in entry
        ]
        whole = _LENGTH + length + max(ends, default=0)
        if part is None or not ends or part.size < whole:
            has = f"has {part.size:,} of {whole:,} bytes" if part and ends else "has a damaged header"
            return f"{path}/{file}: {has}; download it again"
    return None


def _values(part: Part | None) -> dict[str, Any]:
    """The JSON object of a file; empty for anything else."""
    try:
        found = json.loads(part.data) if part is not None else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
