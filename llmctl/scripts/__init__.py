"""Training scripts of Megatron-LM, read without running them, as configs of this trainer."""
