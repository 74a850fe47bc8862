"""Causes of failures, from what the ended programs have left."""
