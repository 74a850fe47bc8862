"""Mixture of experts: routing, the experts divided over the ep axis, and what keeps their load even."""
