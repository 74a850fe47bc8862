"""Compilation of csrc/ into a library and GPU images, and the cache that keeps them."""
