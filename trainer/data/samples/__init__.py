"""Training samples of a decoder: epochs, packing, blends, resuming."""
