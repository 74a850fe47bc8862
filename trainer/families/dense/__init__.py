"""Dense decoders whose parts are mostly Llama's: a file each. Torch-free."""
