"""Copies of a run's newest state on the disks or in the memory of its nodes, each also on a neighbour."""
