"""The program that job.sh hands over to, which starts the ranks and watches them.

It is copied beside the run and started by the python3 of a node. So it needs nothing but the standard library, keeps to
the syntax and library of Python 3.6, and imports nothing else of llmctl.
"""
