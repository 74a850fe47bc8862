"""Preparation of .bin/.idx from raw text, on any number of processes and nodes.

Memory is bounded, and a killed preparation can be resumed.
"""
