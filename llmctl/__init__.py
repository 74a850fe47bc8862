"""The command line: submits, follows, records and resumes jobs. Never imports torch."""

__version__ = "0.4.0"
