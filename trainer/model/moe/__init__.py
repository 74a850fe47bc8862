"""Mixture of experts: routing, expert parallelism, capacity and load balancing."""
