"""Runs beside what the planner predicts for them."""
