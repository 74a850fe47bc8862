"""The parallel trainer, ``python -m trainer``. Never imports llmctl."""
