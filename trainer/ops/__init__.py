"""Fused operations limited by memory bandwidth: one file per op, with every way to compute it."""
