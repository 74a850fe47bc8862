"""Commands of `python -m trainer kernels`: build, doctor, bench."""
