"""Adapters of trainers, with the same model, weights, tokens, AdamW and meter.

benchmarks/train_speed.py runs an adapter as ``python -m benchmarks.peers.NAME``, once per rank.
"""
