"""Text to tokens to micro-batches: tokenizers, indexed datasets, GPT samples and the commands that prepare them."""
