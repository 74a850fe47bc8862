"""Reading, writing and inspection of Megatron-LM's indexed datasets (.bin/.idx)."""
