"""Data parallelism: how the gradients of one iteration are gathered and summed over the replicas."""
