"""Conversion of whole models between this trainer's checkpoints and Hugging Face folders, on the CPU."""
