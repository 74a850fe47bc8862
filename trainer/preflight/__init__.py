"""Preflight: checks of all nodes of a job after the rendezvous, before the model is built."""
