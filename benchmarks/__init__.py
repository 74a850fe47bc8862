"""Side-by-side measurements: each script runs ours and its peers in one session and prints the ratio."""
