"""``llmctl env build`` on real schedulers."""
