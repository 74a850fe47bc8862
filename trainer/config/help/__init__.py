"""Help pages: their parts, their layout and their plain text."""
