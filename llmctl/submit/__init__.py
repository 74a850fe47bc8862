"""Submission of a job: resolve, check, render, plan, execute."""
