"""Checks that steps and replicas are right, and the search for what is wrong."""
