"""The two parts of a save: the state is staged between two steps, then written."""
