"""Context parallelism: sequences divided over the cp axis, and attention across the sequence chunks."""
