"""Fused operations limited by memory bandwidth: one file per op, with all implementations."""
