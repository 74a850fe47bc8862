"""Which layouts fit and what they cost, worked out before any process starts. Free of torch."""
