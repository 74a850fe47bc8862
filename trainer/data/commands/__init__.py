"""Commands on data files: prepare, inspect, merge, train a tokenizer."""
