"""Faults that are injected into real runs: what is told, what recovers by itself, and what is lost."""
