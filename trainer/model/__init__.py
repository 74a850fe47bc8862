"""The decoder model: its parts, and their division over tensor-, context- and expert-parallel ranks."""
