"""Sharded checkpoints: written aside and renamed, readable by every layout.

checkpoints/
  iter_0000500/                       complete from the moment that it has this name
    metadata.json                     progress, config, and for each tensor its shape and where its parts are
    model_rank00000.safetensors       weights, by global name
    optimizer_rank00000.safetensors   masters and moments, "<kind>.<global name>"
  latest_checkpointed_iteration.txt   moved last
  .iter_0000600.tmp-2/                being written by attempt 2, or left over from its death

Every rank writes what it alone speaks for; ranks with nothing of the kind have no file. A part of a tensor is a
row-major stretch of a box of it: [file, key, offset and shape of the box, start and stop of the stretch].
"""
