"""Compilation of csrc/ into a library and GPU images, and the build cache."""
