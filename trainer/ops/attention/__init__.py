"""Attention kernels and the choice among them."""
