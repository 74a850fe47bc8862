"""Saves whose system calls fail one after another, by strace."""
