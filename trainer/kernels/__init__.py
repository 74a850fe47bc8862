"""The operations that are limited by memory, fused: one file per operation, with every way to compute it."""
