"""The terms in which a family is described: keys of config.json, tensors, and forms between two layouts. Torch-free."""
