"""Tuning of layouts on real schedulers."""
