"""Training samples of BERT and T5, in Megatron-LM's order."""
