"""Text from a trained model: loading in any layout, sampling with a key and value cache, log-likelihoods."""
