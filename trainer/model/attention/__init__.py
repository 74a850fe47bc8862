"""Self-attention: the layer, and the core between its two linear layers."""
