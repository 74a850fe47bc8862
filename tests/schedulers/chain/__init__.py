"""Chains of jobs on real schedulers."""
