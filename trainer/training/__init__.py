"""The training loop: set-up, iterations, run summary, peer failures."""
