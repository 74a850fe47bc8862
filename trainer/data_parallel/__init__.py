"""Data parallelism: gradients of one iteration, accumulated and summed over the replicas."""
