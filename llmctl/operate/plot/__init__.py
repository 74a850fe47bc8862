"""Plots of runs, in the terminal and as files: histories -> charts -> text or picture."""
