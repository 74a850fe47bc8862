"""Rank files: one rank's tensors in safetensors format (https://huggingface.co/docs/safetensors#format)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from trainer.checkpoint.checksums import ChecksumWriter, WrittenFile
from trainer.optimizer.split_master import Master, SplitMaster

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

# The format asks for a header padded to 8 bytes, so that every tensor can be mapped in place.
_HEADER_ALIGNMENT = 8


def write_rank_file(path: Path, tensors: Mapping[str, Master]) -> WrittenFile:
    """Write and sync ``tensors``; returns size and checksums of the file.

    Tensors are written one after another straight from their memory, so that a save needs no second copy of the state
    (on a GPU, copies of a few tensors; of split masters, parts of them), and a slice of a shared buffer is stored
    alone.

    Raises:
        OSError: the disk is full, or writing fails.
    """
    # The widest first, so that every tensor begins at a multiple of its elements' size, as mapping requires.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with path.open("wb", buffering=0) as file, ChecksumWriter(file) as writer:
        writer.write(len(text).to_bytes(8, "little"))
        writer.write(text)
        for tensor in tensors.values():
            _write_tensor(writer, tensor)
        written = writer.close()
        os.fsync(file.fileno())
        return written


def _write_tensor(writer: ChecksumWriter, tensor: Master) -> None:
    if isinstance(tensor, SplitMaster):
        for part in tensor.parts():
            _write_tensor(writer, part)
        return
    if tensor.numel():
        writer.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
