"""The program that job.sh hands over to: numbers the attempt, starts the ranks, watches them, says how they ended.

It is copied beside the run and started by the python3 of a node. So it needs nothing but the standard library, keeps to
the syntax and library of Python 3.6, and imports nothing else of llmctl.
"""
