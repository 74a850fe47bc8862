"""Flags of Megatron-LM and its forks that mean something only together."""
