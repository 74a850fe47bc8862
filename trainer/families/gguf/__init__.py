"""GGUF files, llama.cpp's format: header, keys as those of config.json, and tokenizer. Torch-free."""
