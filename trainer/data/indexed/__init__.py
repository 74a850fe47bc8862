"""Megatron-LM's indexed dataset (.bin/.idx): read, write, inspect."""
