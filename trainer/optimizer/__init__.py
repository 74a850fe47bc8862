"""From final gradients to new weights: learning rate, loss scale, clipping and the step itself."""
