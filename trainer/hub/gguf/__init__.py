"""GGUF files (github.com/ggml-org/ggml/blob/master/docs/gguf.md): weights, keys and tokenizer of llama.cpp's format."""
