"""Spare nodes: a later attempt of the same job leaves out a node that was the cause of a failure."""
