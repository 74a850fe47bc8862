"""Hangs: ranks that wait for each other, and what the supervisor does about them."""
