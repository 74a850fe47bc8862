"""`llmctl env build`: the Python environment of a site, step by step."""
