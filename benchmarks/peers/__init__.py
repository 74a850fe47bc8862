"""One adapter per trainer: the same model, initial weights, tokens and AdamW, measured by one meter.

An adapter is run as ``python -m benchmarks.peers.NAME``, once per rank, by benchmarks/train_speed.py.
"""
