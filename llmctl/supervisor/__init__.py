"""Supervisor of a job: job.sh starts this program, which starts the ranks and watches them.

A copy lies in the run directory, and the python3 of a node runs the copy. So the supervisor needs only the standard
library, keeps to the syntax and library of Python 3.6, and imports nothing else of llmctl.
"""
