"""Families of published models: their keys and tensors under Hugging Face's names and under ours. Torch-free."""
