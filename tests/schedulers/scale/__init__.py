"""Scaling over nodes on real schedulers."""
