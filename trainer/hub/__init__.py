"""Hugging Face folders: reading and writing their tensors by the rules of trainer.families."""
