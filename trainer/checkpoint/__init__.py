"""Sharded checkpoints: written aside and renamed, readable by every layout.

checkpoints/
  iter_0000500/                       complete from the moment that it has this name
    metadata.json                     progress, config, and for each tensor its shape and where its parts are
    model_pp00_tp00.safetensors       weights in the training dtype, by global name
    optimizer_pp00_tp00.safetensors   masters and moments, "<kind>.<global name>"
  latest_checkpointed_iteration.txt   moved last
  .iter_0000600.tmp-2/                being written by attempt 2, or left over from its death
"""
