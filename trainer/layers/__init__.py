"""The parts of a transformer block."""
