"""Cluster profiles and job specifications: the resources a site offers and a user requests."""
