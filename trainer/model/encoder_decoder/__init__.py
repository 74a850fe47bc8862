"""T5: an encoder, a decoder that attends to the encoder's output, and a position bias for each."""
