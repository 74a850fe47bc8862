"""``llmctl plan``: the command, and its page."""
