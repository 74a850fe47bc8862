"""The optimizer step: learning rate, loss scale, clipping and the update of the weights."""
