"""Sharded checkpoints: written to a temporary folder and renamed, readable by every layout.

checkpoints/
  iter_0000500/                       complete as soon as the folder has this name
    metadata.json                     progress, config, and for each tensor its shape and the places of its parts
    model_rank00000.safetensors       weights, by global name
    optimizer_rank00000.safetensors   masters and moments, "<kind>.<global name>"
  latest_checkpointed_iteration.txt   updated last
  .iter_0000600.tmp-2/                being written by attempt 2, or left over after its end

Every rank writes the elements that it owns; a rank without elements of a kind has no file. A part of a tensor is a
contiguous range of a flattened shard box: [file, key, offset and shape of the box, start and stop of the range].
"""
