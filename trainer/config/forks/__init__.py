"""Flags that forks and older releases of Megatron-LM have, and its main branch has not. Torch-free."""
