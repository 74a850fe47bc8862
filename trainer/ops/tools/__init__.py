"""Commands of `python -m trainer kernels`: build and doctor."""
