"""Context parallelism: every sequence divided over the ranks of the cp axis, and attention across its parts."""
