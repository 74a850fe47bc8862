"""Decoders with a mixture of experts: a file each. Torch-free."""
