"""Commands on data files: prepare, inspect, merge."""
