"""Runs of one config on several numbers of nodes, and a table of their speed."""
