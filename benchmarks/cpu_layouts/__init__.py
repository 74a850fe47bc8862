"""Predicted memory and time of the trainer on CPU ranks, beside measured ones."""
