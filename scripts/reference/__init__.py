"""The pages below docs/reference, made from the tables and fields of the code."""
