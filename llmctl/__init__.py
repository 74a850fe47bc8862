"""The command line: what the user asked for, made into a job, submitted, followed and recorded. Never imports torch."""

__version__ = "0.1.0"
