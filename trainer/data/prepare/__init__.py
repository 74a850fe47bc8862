"""From raw text to .bin/.idx: bounded memory, any number of processes and nodes, resumable after a kill."""
